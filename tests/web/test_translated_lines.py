"""Chinese pages say in Chinese what other parts of the program write: errors, findings, reasons and charts."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posttrain
from posttrain.evaluate.retention import retention_sentences
from posttrain.loop.tuning import Tuning, round_sentence
from posttrain.report.charts.bars import funnel
from posttrain.report.charts.heat_map import heat_map
from posttrain.report.charts.rounds import CurvePoint, learning_curve_chart
from posttrain.report.formatting import reason_text
from posttrain.select.reasons import join_reasons, uncertainty_reasons, weak_class_reason
from posttrain.store.errors import UserError
from posttrain.store.message import Message
from posttrain.tune.goal import Goal
from posttrain.tune.objectives import Objective, Objectives
from posttrain.tune.space import Space
from posttrain.tune.transfer.past import PastStudy
from posttrain.tune.transfer.warm_start import choose_warm_start
from posttrain.tune.trial import Trial, TrialState
from posttrain.web.translations import LINES, Translator

PACKAGE = Path(posttrain.__file__).parent
CHINESE = Translator("zh")
ERRORS = {"UserError", "Conflict", "NotFound", "RequestRejected"}
# What people meet on the pages; errors of programs, such as a body that is not JSON, stay English.
MODULES = (
    *(f"label/{name}.py" for name in ("accounts", "tokens", "answer_kinds", "queue", "queue_leases", "queue_review")),
    *(f"web/{name}.py" for name in ("access", "loop_pages", "api/labelling", "api/loop", "api/people", "api/review")),
    "loop/model_registry.py",
    "inspect/show.py",
)
COMMANDS = re.compile(r"(pip|posttrain) .*")


def has_english(text: str) -> bool:
    return re.search(r"(?<![`\w])[a-z]{3,} [a-z]{2,}", text) is not None


def templates(node: ast.AST) -> str | None:
    """Returns the text of a literal, with a number for each part that is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "7" for part in node.values)
    return None


def error_lines() -> Iterator[tuple[str, str]]:
    for module in MODULES:
        for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ERRORS:
                texts = [*node.args, *(word.value for word in node.keywords if word.arg == "fix")]
                yield from ((module, text) for text in map(templates, texts) if text and not COMMANDS.fullmatch(text))


def sentences() -> Iterator[tuple[str, str]]:
    """Yields the sentences of findings, and of a pause."""
    for path in (PACKAGE / "label/queue_review.py", *sorted((PACKAGE / "label/quality").glob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "sentence":
                text = templates(node.value)
                # The control of a suggestion bias is a part with words of its own.
                yield from (
                    (path.name, text.replace("; 7 7 of 7", f"; {control} 7 of 7"))
                    for control in ("the others accepted", "without suggestions the annotator errs on")
                    if text
                )


@pytest.mark.parametrize("lines", [error_lines, sentences])
def test_all_that_the_pages_may_show_is_translated(lines: Any) -> None:
    collected = list(lines())
    assert len(collected) > 12
    left = [(module, line) for module, line in collected if has_english(CHINESE.line(line))]
    assert not left


def test_the_actions_of_the_log_are_translated() -> None:
    actions = {
        str(action.value)
        for path in (*(PACKAGE / "label").glob("*.py"), *(PACKAGE / "web" / "api").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for name, place in (("record_change", 2), ("_record", 1))
        if name in (getattr(node.func, "id", ""), getattr(node.func, "attr", ""))
        for action in node.args[place : place + 1]
        if isinstance(action, ast.Constant)
    }
    assert {"sign in", "promote", "drop item"} <= actions
    assert not {action for action in actions if action not in LINES["zh"]}


def test_an_error_is_translated_with_its_remedy_and_its_names_stay() -> None:
    error = UserError("the name `choose another one` is taken", fix="choose another one")
    assert CHINESE.line(str(error)) == "用户名 `choose another one` 已被使用；请另选一个"
    assert Translator("en").line(str(error)) == str(error)
    assert CHINESE.line("nobody translated this; continue with the next one") == (
        "nobody translated this；请继续下一条"
    )
    assert CHINESE.line("no such line") == "no such line"


def test_the_reason_of_a_choice_is_translated() -> None:
    (uncertain,) = uncertainty_reasons("entropy", np.array([1.21]), np.array([0]), np.array([True]))
    weak = weak_class_reason("card", None, frozenset({"card"}), is_scored=True)
    reason = join_reasons(weak, uncertain, "nearest chosen record of 3 others")
    assert CHINESE.line(reason) == "可能属于效果较差的类别 `card`；entropy 1.21，居总体前 100%；代表另外 3 条相近数据"


def test_what_a_merge_kept_is_translated() -> None:
    row = {"model": "model-1", "suite": "test", "metric": "accuracy", "ratio": 0.9, "low": 0.8, "high": None, "n": 20}
    (sentence,) = retention_sentences([row])
    assert CHINESE.line(sentence) == (
        "合并模型在 test 上保留了 model-1 的准确率的 90.0%（区间 80.0% 至 infinite，n = 20）"
    )


@pytest.mark.parametrize(
    ("line", "translation"),
    [
        (
            "labels for round 2: 3 of 16 are decided, 1 answer is wanted and 2 items are in review; "
            "answer on the pages (posttrain serve) or in file.csv, then run again",
            "第 2 轮的标注：已确定 3/16，还需 1 个回答，2 条待复核；请在页面上或 file.csv 中回答，然后再次运行",
        ),
        (
            "labels for round 1: 3 of 16 are filled in labels/round-1.csv; fill the rest, then run again",
            "第 1 轮的标注：labels/round-1.csv 中已填写 3/16；请填写其余部分，然后再次运行",
        ),
    ],
)
def test_what_the_loop_waits_for_is_translated(line: str, translation: str) -> None:
    assert CHINESE.line(line) == translation


def test_translations_fill_in_the_parts_that_their_lines_have() -> None:
    for line, translation in LINES["zh"].items():
        parts = len(re.findall("{#?}", line))
        assert {int(part) for part in re.findall(r"{(\d)", translation)} <= set(range(parts)), line


def test_a_long_line_of_repeated_clauses_takes_no_time() -> None:
    # Each pattern may fit at many places: the work must not grow with their product.
    for clause in ("a accepted 1 of ", "`x` was 3% of the answers under version 1 of the guideline, and is ", "; a"):
        line = (clause * 300)[:999]
        assert CHINESE.line(line) is not None


def test_a_chart_of_our_words_is_translated_and_names_of_records_stay() -> None:
    points = [
        CurvePoint(Message("round {number}", number=1), Message("{count} labels", count="48"), 0.5, (0.5,), "deploy"),
        CurvePoint(Message("round {number}", number=2), "", 0.4, (0.5,), "refuse"),
    ]
    title = Message("{metric} of each round's candidate and of the champion", metric=Message("accuracy"))
    chart = learning_curve_chart(points, title, measure=Message("accuracy"))
    assert chart is not None
    shown = chart.translated(CHINESE.line)
    assert shown.option["xAxis"][0]["data"] == ["第 1 轮\n48 个标注", "第 2 轮"]
    assert [entry["name"] for entry in shown.option["legend"]["data"]] == ["在用的冠军模型", "已部署", "已拒绝"]
    assert [series["name"] for series in shown.option["series"] if series["name"]] == [
        "在用的冠军模型",
        "已部署",
        "已拒绝",
    ]
    page = shown.__html__()
    for text in (
        "<summary>数据</summary>",
        "将图保存为 SVG",
        "各轮候选模型与冠军模型的准确率",
        "第 1 轮：50.0%，已部署",
    ):
        assert text in page
    assert "Save the picture" not in chart.__html__(), "the page of a report has its texts in its script"
    # Labels of a task that are called like words of ours.
    labels = heat_map({("files", "kept"): 3}, ["files", "kept"], ["files", "kept"], "confusion")
    assert labels is not None
    assert labels.translated(CHINESE.line).option["xAxis"]["data"] == ["files", "kept"]
    assert "<td>files</td>" in labels.translated(CHINESE.line).__html__()
    kept = funnel(10, [(reason_text("exact_duplicate"), 2)], "records of pool").translated(CHINESE.line)
    assert kept.option["yAxis"][0]["data"] == ["读入", "完全重复", "保留"]


def warm_start_sentences() -> list[str]:
    """Returns what a round says of its warm start, in every case."""

    def past(name: str, maximize: bool = False, space: dict[str, Any] | None = None, trials: int = 6) -> PastStudy:
        objectives = Objectives((Objective("held-out loss", maximize),))
        goal = Goal(Space(space or {"rate": {"float": [0, 1]}}), objectives)
        values = [Trial(n, {"rate": n / 9}, {"rate": n / 9}, TrialState.FINISHED, value=1.0 + n) for n in range(trials)]
        return PastStudy(name, goal, {"records": 3.0}, tuple(values))

    goal = past("this", space={"rate": {"float": [0, 1]}, "size": [1, 2]}).goal
    other, useless = past("round 2", space={"depth": [1, 2]}), past("round 3", maximize=True)
    cold, empty = choose_warm_start([past("round 1")], goal, {"records": 9.0}), past("round 4", trials=0)
    warm = choose_warm_start([past("round 1"), other, useless, empty], goal, {"records": 3.0})
    unknown = choose_warm_start([past("round 1")], goal, {})
    texts = [*cold.sentences, *warm.sentences, *unknown.sentences]
    assert len(texts) == 9
    return [round_sentence(text) for text in texts]


def test_sentences_on_tuned_settings() -> None:
    fields = {"round": 1, "rule": "records > 1", "values": "records = 12", "records": 12, "held_out": 6}
    fields |= {"metric": "loss", "maximize": False, "configured": {}, "trials": 3, "trained": 2.5}
    rate, accuracy = "train.learning_rate", {"value": 0.25, "value_before": 0.5}
    better = Tuning(**fields, settings={rate: 1e-3}, before={rate: 1e-4}, **accuracy)
    assert [CHINESE.line(sentence) for sentence in better.sentences] == [
        "已调优，从 0.5 变为 0.25；在 6 条留出记录上的 loss；3 次试验，相当于 2.5 次训练的工作量",
        f"已调优 {rate}：0.0001 → 0.001",
        "按规则 records > 1 调优（records = 12）",
    ]
    same = {"settings": {rate: 1e-4}, "before": {rate: 1e-4}}
    outcomes = [Tuning(**fields, **same, value=value, value_before=value).sentences[0] for value in (0.5, None)]
    failed = Tuning(**fields, settings={rate: 1e-3}, before={rate: 1e-4}, value=0.25, value_before=None).sentences[0]
    for sentence in (*outcomes, failed, *warm_start_sentences()):
        assert not has_english(CHINESE.line(sentence)), sentence
