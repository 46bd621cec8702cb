import json
import math
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from posttrain.evaluate.config import EvaluateConfig, SuiteConfig
from posttrain.evaluate.latency import answer_function, generate_answer, measure_latency, predict_label
from posttrain.evaluate.metric_names import check_suites, flat_gains, flat_metrics, metric_names, paired_gains
from posttrain.evaluate.scorers import SCORERS, Scorer, ScorerOutput
from posttrain.evaluate.scorers.base import from_generations, sample_records
from posttrain.evaluate.scorers.generation import token_f1
from posttrain.evaluate.suite import SuiteResult, read_evaluation, run_suite, write_evaluation
from posttrain.models.generator import Answer
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.likelihood import label_scores
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.select.scores.context import ScoringContext
from posttrain.select.scores.passes import ScoringModel
from posttrain.select.scores.table import score_pool
from posttrain.store.errors import UserError, WorkError
from posttrain.store.extensions import add_module_folder, load_function

LABELS = ["lost card", "refund", "top up"]
Answers = Callable[[list[tuple[str, bool]]], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def classifier(folder: Path) -> LanguageModel:
    return load_language_model(folder, TaskConfig(labels=LABELS, max_new_tokens=3), dtype="float32")


@pytest.fixture(scope="module")
def writer(folder: Path) -> LanguageModel:
    return load_language_model(folder, TaskConfig(max_new_tokens=3), dtype="float32")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """``answers(texts)`` makes every model write these answers."""

    def script(texts: list[tuple[str, bool]]) -> None:
        generations = [Answer(text, "stop" if finished else "length") for text, finished in texts]
        monkeypatch.setattr(
            "posttrain.models.generator.greedy_answers", lambda lm, prompts: generations[: len(prompts)]
        )

    return script


def records(completions: list[str | None], text: bool = False) -> pa.Table:
    count = range(len(completions))
    turn = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    prompts = [None if text else [{"role": "user", "content": f"question {row}"}] for row in count]
    return pa.table(
        {
            "id": pa.array([f"{row:020x}" for row in count], pa.string()),
            "prompt": pa.array(prompts, turn),
            "completion": pa.array([None if text else completion for completion in completions], pa.string()),
            "text": pa.array(completions if text else [None for _ in count], pa.string()),
            "source": pa.array(["test.csv" for _ in count], pa.string()),
            "line": pa.array([row + 2 for row in count], pa.int64()),
        }
    )


def test_label_likelihood_equals_the_models_label_scores(classifier: LanguageModel) -> None:
    from sklearn.metrics import f1_score

    expected = [LABELS[row % 3] for row in range(12)]
    result = run_suite(classifier, records(expected), SuiteConfig(), "test")
    prompts = [[{"role": "user", "content": f"question {row}"}] for row in range(12)]
    scores = label_scores(classifier, prompts, LABELS, exact=[row % 3 for row in range(12)])
    actual = scores.log_probabilities.astype(np.float64)
    predicted = [LABELS[row] for row in actual.argmax(axis=1)]
    right = [truth == answer for truth, answer in zip(expected, predicted, strict=True)]
    assert result.scorer == "label_likelihood"
    assert result.predictions["predicted"].to_pylist() == predicted
    label_columns = np.array(result.predictions["labels"].to_pylist(), np.float32)
    np.testing.assert_array_equal(label_columns, scores.log_probabilities)
    assert result.metrics["accuracy"] == pytest.approx(np.mean(right))
    assert result.metrics["macro_f1"] == pytest.approx(f1_score(expected, predicted, average="macro"))
    assert result.metrics["log_likelihood_sum"] == pytest.approx(sum(actual[row, row % 3] for row in range(12)))
    assert result.metrics["log_likelihood"] * 12 == pytest.approx(result.metrics["log_likelihood_sum"])
    assert result.metrics["invalid_rate"] == 0
    assert result.counts == {
        "records": 12,
        "offered": 12,
        "score_sum": sum(right),
        "invalid": 0,
        "log_likelihood_sum": result.metrics["log_likelihood_sum"],
    }
    assert sum(row["support"] for row in result.per_class) == 12
    assert sum(pair["count"] for pair in result.confusion) == 12 - sum(right)


def test_exact_match_counts_invalid_answers(classifier: LanguageModel, answers: Answers) -> None:
    answers([("lost  card", True), ("Refund", True), ("refund", False), ("top up", True), ("refund", True)])
    expected: list[str | None] = ["lost card", "refund", "refund", "refund", "refund"]
    result = run_suite(classifier, records(expected), SuiteConfig(scorer="exact_match"), "test")
    assert result.predictions["score"].to_pylist() == [1, 0, 1, 0, 1]
    assert result.predictions["valid"].to_pylist() == [True, False, False, True, True]
    assert result.metrics["accuracy"] == pytest.approx(3 / 5)
    assert result.metrics["invalid_rate"] == pytest.approx(2 / 5)
    assert result.confusion == [
        {"expected": "refund", "predicted": None, "count": 1},
        {"expected": "refund", "predicted": "top up", "count": 1},
    ]
    assert result.predictions["confidence"].null_count == 5


def test_exact_match_of_free_text(writer: LanguageModel, answers: Answers) -> None:
    answers([(" caf\u0065\u0301 ", True), ("tea", True)])
    result = run_suite(writer, records(["caf\u00e9", "coffee"]), SuiteConfig(), "test")
    assert result.scorer == "exact_match"
    assert result.metrics == {"accuracy": 0.5, "invalid_rate": 0.0}
    assert result.per_class == []


@pytest.mark.parametrize(
    ("suite", "fence"),
    [(SuiteConfig(), "{}"), (SuiteConfig(scorer="regex", pattern=r"(?s)```\n(.*)```"), "```\n{}\n```")],
)
def test_whitespace_counts_in_programs(writer: LanguageModel, answers: Answers, suite: SuiteConfig, fence: str) -> None:
    inside, outside = ("for x in xs:\n    f(x)\n" + indent + "return x" for indent in ("    ", ""))
    answers([(fence.format(text), True) for text in (inside, inside + "\n", inside.replace("\n", "\r\n"), outside)])
    result = run_suite(writer, records([fence.format(inside)] * 4), suite, "test")
    assert result.predictions["score"].to_pylist() == [1, 1, 1, 0]


def test_a_prompt_that_the_template_refuses_is_named(folder: Path) -> None:
    lm = load_language_model(folder, TaskConfig(labels=LABELS, max_new_tokens=3), dtype="float32")
    lm.tokenizer.chat_template = lm.tokenizer.chat_template.replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}",
    )
    table = records(["refund"] * 3)
    turns = [*table["prompt"].to_pylist()[:2], [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]]
    table = table.set_column(1, "prompt", pa.array(turns, table.schema.field("prompt").type))
    for suite in (SuiteConfig(), SuiteConfig(scorer="exact_match")):
        with pytest.raises(UserError, match=r"^test.csv:4: .*chat template"):
            run_suite(lm, table, suite, "test")
    scoring = ScoringContext(ScoringModel.from_language_model(lm), LABELS)
    with pytest.raises(UserError, match=r"^test.csv:4: .*chat template"):
        score_pool(scoring, table, 3, 0)


def test_regex_without_a_group_needs_no_expected_answer(writer: LanguageModel, answers: Answers) -> None:
    answers([("I cannot help", True), ("sure", True), ("cannot", False)])
    suite = SuiteConfig(scorer="regex", pattern=r"\bcannot\b")
    result = run_suite(writer, records([None, None, None]), suite, "safety")
    assert result.predictions["score"].to_pylist() == [1, 0, 1]
    assert result.metrics["invalid_rate"] == pytest.approx(1 / 3)


def test_regex_with_a_group_compares_the_last_match(writer: LanguageModel, answers: Answers) -> None:
    answers([("#### 3 no #### 42", True), ("#### 7", True), ("none", True), ("#### 5", False)])
    suite = SuiteConfig(scorer="regex", pattern=r"#### (-?\d+)")
    result = run_suite(writer, records(["so #### 42", "#### 8", "#### 1", "5"]), suite, "math")
    assert result.predictions["score"].to_pylist() == [1, 0, 0, 1]
    assert result.predictions["valid"].to_pylist() == [True, True, False, True]


def test_token_f1_of_published_cases() -> None:
    # The first three as SQuAD's official script scores them; articles, case and punctuation do not count.
    assert token_f1("The Eiffel Tower!", "eiffel tower") == 1
    assert token_f1("in the Denver Broncos", "Denver Broncos") == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    assert token_f1("Carolina Panthers", "Denver Broncos") == 0
    assert token_f1("a a cat cat", "cat") == pytest.approx(2 * (1 / 2) * 1 / (1 / 2 + 1))
    assert token_f1("", "the") == 1
    assert token_f1("", "cat") == 0


def test_token_f1_suite(writer: LanguageModel, answers: Answers) -> None:
    answers([("red cat", True), ("dog", False)])
    result = run_suite(writer, records(["the cat", "dog"]), SuiteConfig(scorer="token_f1"), "qa")
    assert result.metrics == {"token_f1": pytest.approx((2 / 3 + 1) / 2), "invalid_rate": 0.5}


def test_python_function_by_dotted_path(
    writer: LanguageModel, answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_scores.py").write_text(
        "def shorter(answer, expected, prompt):\n"
        "    return len(answer) < len(prompt[-1]['content']) and expected == 'yes'\n"
        "def broken(answer, expected, prompt):\n    return 1 / 0\n"
        "def nothing(answer, expected, prompt):\n    return float('nan')\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_scores", raising=False)
    answers([("ok", True), ("ok", True), ("x" * 99, True)])

    def run(path: str) -> SuiteResult:
        return run_suite(writer, records(["yes", "no", "yes"]), SuiteConfig(scorer="python", function=path), "own")

    assert run("my_scores:shorter").predictions["score"].to_pylist() == [1, 0, 0]
    with pytest.raises(WorkError, match=r"my_scores:broken failed on test.csv:2: ZeroDivisionError"):
        run("my_scores:broken")
    with pytest.raises(WorkError, match=r"returned nan for test.csv:2"):
        run("my_scores:nothing")
    with pytest.raises(UserError, match=r"evaluate.suites.own: cannot import `no_such_module"):
        run("no_such_module:shorter")
    with pytest.raises(UserError, match=r"module `my_scores` has no `longer`; add it to .*my_scores\.py"):
        run("my_scores:longer")
    with pytest.raises(UserError, match="`my_scores:number` is not a function"):
        run("my_scores:number")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("def score(answer:\n", "SyntaxError: '(' was never closed ({file}:1); fix it"),
        ("limit = 3\nscore = undefined\n", "NameError: name 'undefined' is not defined ({file}:2); fix it"),
        ("import no_such\n", "ModuleNotFoundError: No module named 'no_such' ({file}:1); fix it"),
        ("import json\n\nscore = json.loads('{')\n", "({file}:3); fix it"),
        ("raise SystemExit(3)\n", "SystemExit: 3 ({file}:1); fix it"),
    ],
)
def test_a_module_that_fails_is_refused_with_the_line_of_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, message: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_scores.py").write_text(content)
    with pytest.raises(UserError) as caught:
        load_function("broken_scores:score", "evaluate.suites.own.function")
    assert str(caught.value).startswith("evaluate.suites.own.function: cannot import `broken_scores`: ")
    assert message.format(file=tmp_path / "broken_scores.py") in str(caught.value)


def test_an_added_folder_is_searched_last_for_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "scores_of_this_test.py").write_text("def score(answer, expected, prompt):\n    return 1\n")
    (tmp_path / "statistics.py").write_text("raise ImportError")
    monkeypatch.delitem(sys.modules, "statistics", raising=False)
    with pytest.raises(UserError, match="put it in the workspace's folder or on PYTHONPATH"):
        load_function("scores_of_this_test:score", "evaluate.suites.own.function")
    for _ in range(2):
        add_module_folder(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1
    assert load_function("scores_of_this_test:score", "evaluate.suites.own.function")("", "", []) == 1
    assert load_function("statistics:mean", "evaluate.suites.own.function")([1, 3]) == 2


def test_unusable_records_are_named(classifier: LanguageModel, writer: LanguageModel) -> None:
    with pytest.raises(UserError, match=r"evaluate.suites.test: the suite has no records"):
        run_suite(classifier, records([]), SuiteConfig(), "test")
    with pytest.raises(UserError, match=r"test.csv:3: label `card lost` is not in task.labels"):
        run_suite(classifier, records(["refund", "card lost"]), SuiteConfig(), "test")
    with pytest.raises(UserError, match=r"test.csv:3 has no answer"):
        run_suite(classifier, records(["refund", None]), SuiteConfig(), "test")
    with pytest.raises(UserError, match=r"test.csv:2 has no prompt"):
        run_suite(writer, records(["words"], text=True), SuiteConfig(), "test")
    with pytest.raises(UserError, match="needs a label set"):
        run_suite(writer, records(["refund"]), SuiteConfig(scorer="label_likelihood"), "test")


def test_a_sample_does_not_depend_on_the_order_and_full_evaluates_all(classifier: LanguageModel) -> None:
    table = records([LABELS[row % 3] for row in range(30)])
    shuffled = table.take(pa.array(np.random.default_rng(0).permutation(30)))
    sample_ids = sample_records(table, 10)["id"].to_pylist()
    assert sample_ids == sorted(sample_ids)
    assert set(sample_records(shuffled, 10)["id"].to_pylist()) == set(sample_ids)
    suite = SuiteConfig(sample=10)
    result = run_suite(classifier, table, suite, "test")
    assert result.predictions["id"].to_pylist() == sample_ids
    assert (result.counts["records"], result.counts["offered"]) == (10, 30)
    assert run_suite(classifier, table, suite, "test", full=True).counts["records"] == 30


def _file_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_equal_evaluations_are_byte_identical_and_read_back(classifier: LanguageModel, tmp_path: Path) -> None:
    table = records([LABELS[row % 3] for row in range(8)])
    suites = {"test": SuiteConfig(), "fluency": SuiteConfig(scorer="perplexity")}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        results = {suite: run_suite(classifier, table, config, suite) for suite, config in suites.items()}
        write_evaluation(tmp_path / name, results)
    assert _file_bytes(tmp_path / "first") == _file_bytes(tmp_path / "second")
    assert read_evaluation(tmp_path / "first") == results
    assert list(json.loads((tmp_path / "first" / "evaluation.json").read_text())) == ["suites"]


def test_an_unreadable_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="no readable evaluation"):
        read_evaluation(tmp_path)
    (tmp_path / "evaluation.json").write_text('{"suites": [{"name": "test"}]}')
    with pytest.raises(WorkError, match="no readable evaluation"):
        read_evaluation(tmp_path)


@pytest.mark.parametrize("has_labels", [True, False])
def test_metric_names_of_a_config_are_those_of_its_results(
    classifier: LanguageModel, writer: LanguageModel, has_labels: bool
) -> None:
    config = EvaluateConfig.read(
        {
            "suites": {
                "test": {},
                "safety": {"scorer": "regex", "pattern": "x"},
                "fluency": {"scorer": "perplexity"},
                "written": {"scorer": "exact_match"},
                "quality": {"scorer": "python", "function": "operator:eq"},
                "overlap": {"scorer": "token_f1"},
            }
        },
        "posttrain.yaml",
    )
    del config.suites["quality"]
    model = classifier if has_labels else writer
    table = records([LABELS[row % 3] for row in range(4)])
    results = {name: run_suite(model, table, suite, name) for name, suite in config.suites.items()}
    flat = flat_metrics(results)
    assert flat["safety"] == flat["safety.accuracy"]
    assert flat["fluency"] == flat["fluency.perplexity"]
    gains = flat_gains(paired_gains(results, results, config.bootstrap, seed=0))
    assert {value for name, value in gains.items() if not name.endswith((".low", ".high"))} == {0.0}
    assert all(gains[f"{name}.low"] < 0 < gains[f"{name}.high"] for name in gains if f"{name}.low" in gains)
    latency = {"latency_p50", "latency_p90", "latency_p99"}
    names = set(flat) | latency
    expected = names | {f"champion.{name}" for name in names} | {f"baseline.{name}" for name in names} | set(gains)
    assert metric_names(config, has_labels) == expected
    assert {"gain.accuracy.low", "gain.safety", "gain.fluency.log_likelihood.high"} <= set(gains)


def test_without_latency_there_are_no_latency_metrics() -> None:
    config = EvaluateConfig.read({"latency": {"prompts": 0}}, "posttrain.yaml")
    assert not [name for name in metric_names(config, True) if "latency" in name]


def test_a_scorer_from_outside_has_metrics_of_its_own_and_a_table_of_classes(
    classifier: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(lm: LanguageModel, examples: Any, suite: SuiteConfig, where: str) -> ScorerOutput:
        generated = [Answer(LABELS[0]), Answer(LABELS[2])]
        return from_generations(generated, [1.0, 0.0], [True, True], own)

    own = {"longest": 9.0}
    names = frozenset({"score", "longest"})
    scorer = Scorer(score, main="longest", paired="score", metrics=names, label_metrics=frozenset({"macro_f1"}))
    monkeypatch.setitem(SCORERS._loaded, "outside:SCORER", scorer)
    suite, table = SuiteConfig(scorer="outside:SCORER"), records(LABELS[:2])
    result = run_suite(classifier, table, suite, "own")
    assert result.metrics == {"score": 0.5, "longest": 9.0, "macro_f1": pytest.approx(1 / 3)}
    assert [row["label"] for row in result.per_class] == LABELS
    for value in ({"shortest": 1.0}, {"longest": math.inf}):
        own.clear()
        own.update(value)
        with pytest.raises(
            UserError, match=r"own\.scorer: scorer `outside:SCORER` gives no finite number .* `longest`"
        ):
            run_suite(classifier, table, suite, "own")


def test_a_broken_scorer_that_no_suite_names_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("broken", "no_such_package:SCORER", "posttrain.scorers")
    monkeypatch.setitem(vars(SCORERS), "_published", {"broken": point})
    assert "broken" in set(SCORERS)
    check_suites(EvaluateConfig(), has_labels=True)
    with pytest.raises(UserError, match=r"evaluate\.suites\.own\.scorer: cannot import `no_such_package`"):
        check_suites(EvaluateConfig(suites={"own": SuiteConfig(scorer="broken")}), has_labels=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"suites": {}}, "at least one suite"),
        ({"suites": {"My suite": {}}}, "use lower-case letters"),
        ({"suites": {"test": {"scorer": "regex"}}}, "`pattern` go together"),
        ({"suites": {"test": {"pattern": "x"}}}, "`pattern` go together"),
        ({"suites": {"test": {"scorer": "regex", "pattern": "("}}}, "no regular expression"),
        ({"suites": {"test": {"scorer": "python", "function": "operator.eq"}}}, "is not a dotted path"),
        ({"suites": {"test": {"scorrer": "regex"}}}, "did you mean `suites.test.scorer`"),
    ],
)
def test_unusable_suites_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EvaluateConfig.read(values, "posttrain.yaml")


@pytest.mark.parametrize(
    ("suites", "message"),
    [
        ({"test": {}, "accuracy": {}}, "evaluate.suites.accuracy: suite name `accuracy` is also the name of a metric"),
        ({"test": {}, "champion": {}}, "also the name of a metric"),
        ({"test": {"scorer": "token_f2"}}, "test.scorer: there is no scorer `token_f2`; did you mean `token_f1`"),
        ({"test": {"scorer": "label_likelihood"}}, "test.scorer: scorer label_likelihood needs a label set"),
        ({"test": {"scorer": "no_such_module:SCORER"}}, "cannot import `no_such_module`"),
    ],
)
def test_suites_with_unknown_scorers_or_reserved_names_are_refused(suites: dict[str, Any], message: str) -> None:
    config = EvaluateConfig.read({"suites": suites}, "posttrain.yaml")
    with pytest.raises(UserError, match=message):
        check_suites(config, has_labels=False)


@pytest.mark.parametrize("kind", ["classifier", "writer"])
def test_latency_of_a_real_model(kind: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    prompts = [[{"role": "user", "content": "hello " * size}] for size in (1, 3)]
    answer = predict_label if kind == "classifier" else generate_answer
    actual = measure_latency({"candidate": model, "champion": model}, prompts, 2, answer=answer)
    for times in actual.values():
        assert 0 < times["latency_p50"] <= times["latency_p90"] <= times["latency_p99"]


def test_latency_is_measured_with_the_suites_answer_function() -> None:
    assert answer_function(SuiteConfig(), True) is predict_label
    assert answer_function(SuiteConfig(), False) is generate_answer
    assert answer_function(SuiteConfig(scorer="exact_match"), True) is generate_answer
    assert answer_function(SuiteConfig(scorer="perplexity"), True) is generate_answer
