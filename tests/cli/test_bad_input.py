"""Every mistake of the user gives one clear line and exit code 2, and does not change the workspace."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Call = Callable[..., Any]
Tree = Callable[[Path], dict[str, str]]


def change(root: Path, section: str, **values: Any) -> None:
    config = yaml.safe_load((root / "posttrain.yaml").read_text())
    config[section] = {**config.get(section, {}), **values}
    (root / "posttrain.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def name_file(root: Path, name: str, content: str | bytes | None, section: str = "pool") -> None:
    if content is not None:
        (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    change(root, "data", **{section: [name]}, columns=None if name.endswith("jsonl") else {"prompt": "text"})


Break = Callable[[Path], None]
GOOD = '{"prompt": "a card", "completion": "card"}\n'


def missing_file(root: Path) -> None:
    (root / "pool.csv").unlink()


def missing_test_file(root: Path) -> None:
    (root / "test.csv").unlink()


def missing_answers(root: Path) -> None:
    (root / "answers.csv").unlink()


def missing_labels(root: Path) -> None:
    change(root, "task", labels="labels.txt")


def labels_not_utf8(root: Path) -> None:
    (root / "labels.txt").write_bytes(b"card\ncaf\xe9\n")
    change(root, "task", labels="labels.txt")


def labels_not_text(root: Path) -> None:
    change(root, "task", labels=[True, False])


def likelihood_of_free_text(root: Path) -> None:
    change(root, "task", labels=None)
    change(root, "evaluate", suites={"test": {"scorer": "label_likelihood"}})


def margin_of_free_text(root: Path) -> None:
    change(root, "task", labels=None)
    change(root, "select", strategy="margin")


def answers_not_named(root: Path) -> None:
    change(root, "label", file=None)


def empty_file(root: Path) -> None:
    (root / "pool.csv").write_bytes(b"")


def header_only(root: Path) -> None:
    (root / "test.csv").write_text("text,label\n")


def broken_json(root: Path) -> None:
    name_file(root, "pool.jsonl", GOOD * 2 + '{"prompt": "a ca\n' + GOOD)


def not_utf8(root: Path) -> None:
    name_file(root, "pool.jsonl", GOOD.encode() + b'{"prompt": "\xff"}\n')


def mixed_shapes(root: Path) -> None:
    name_file(root, "pool.jsonl", GOOD * 3 + '{"text": "plain"}\n')


def unknown_columns(root: Path) -> None:
    (root / "pool.csv").write_text("txet\nhello\n")


def label_outside_the_set(root: Path) -> None:
    with (root / "test.csv").open("a") as file:
        file.write("which crad,crad\n")


def answer_outside_the_set(root: Path) -> None:
    with (root / "answers.csv").open("a") as file:
        file.write("which crad,crad\n")


def gold_file(root: Path, text: str | None) -> None:
    change(root, "label", annotator="people", queue={"gold_file": "gold.csv"})
    if text is not None:
        (root / "gold.csv").write_text(text)


def missing_gold_file(root: Path) -> None:
    gold_file(root, None)


def gold_answer_outside_the_set(root: Path) -> None:
    gold_file(root, "text,label\nmy card,card\nwhich crad,crad\n")


def gold_without_answers(root: Path) -> None:
    gold_file(root, "text,label\nmy card,\n")


def unknown_key(root: Path) -> None:
    change(root, "train", epoch=3)


def unknown_section(root: Path) -> None:
    change(root, "trian", epochs=3)


def wrong_value(root: Path) -> None:
    change(root, "train", epochs="many")


def no_metric(root: Path) -> None:
    change(root, "gate", deploy=["acuracy >= 0"])


def rule_without_metric(root: Path) -> None:
    change(root, "gate", deploy=["1 >= 0"])


def no_rule(root: Path) -> None:
    change(root, "gate", deploy=["accuracy >="])


def no_trigger(root: Path) -> None:
    change(root, "triggers", any=["new_record > 3"])


def no_model(root: Path) -> None:
    _model(root, "no/such/model")


def no_model_in_the_folder(root: Path) -> None:
    (root / "base").mkdir()
    (root / "base" / "readme.txt").write_text("nothing")
    _model(root, "base")


def no_gguf(root: Path) -> None:
    (root / "base.gguf").write_text("nothing")
    _model(root, "base.gguf")


def _model(root: Path, model: str) -> None:
    config = yaml.safe_load((root / "posttrain.yaml").read_text())
    (root / "posttrain.yaml").write_text(yaml.safe_dump({**config, "model": model}, sort_keys=False))


def broken_yaml(root: Path) -> None:
    (root / "posttrain.yaml").write_text("model: tiny\ndata: {pool: [pool.csv\n")


def no_mapping(root: Path) -> None:
    (root / "posttrain.yaml").write_text("- model\n")


def repeated_key(root: Path) -> None:
    with (root / "posttrain.yaml").open("a") as file:
        file.write("model: tiny\n")


def list_as_key(root: Path) -> None:
    (root / "posttrain.yaml").write_text("model: tiny\n? [a, b]\n: 1\n")


def control_character(root: Path) -> None:
    (root / "posttrain.yaml").write_bytes(b"model: \x07\n")


def yaml_not_utf8(root: Path) -> None:
    (root / "posttrain.yaml").write_bytes(b"model: \xff\n")


MISTAKES: list[tuple[Break, str]] = [
    (missing_file, "pool.csv: there is no such file"),
    (missing_test_file, "test.csv: there is no such file"),
    (missing_answers, "label.file: no such file: answers.csv"),
    (missing_labels, "task.labels: no such file: labels.txt; write the labels there, one per line"),
    (labels_not_utf8, "labels.txt:2: holds bytes that are not UTF-8; save as UTF-8"),
    (labels_not_text, "`task.labels`: label 1 is read as True, not as text; put it in quotes"),
    (likelihood_of_free_text, "evaluate.suites.test.scorer: scorer label_likelihood needs a label set"),
    (margin_of_free_text, "select.strategy: strategy `margin` compares the two most probable labels"),
    (answers_not_named, "label.file: the oracle needs a file of answers; name it"),
    (empty_file, "pool.csv: the file holds no records"),
    (header_only, "test.csv: the file holds no records"),
    (broken_json, "pool.jsonl:3: broken JSON: "),
    (not_utf8, "pool.jsonl:2: holds bytes that are not UTF-8"),
    (mixed_shapes, "pool.jsonl:4: has the shape `text`, but line 1 has the shape `prompt`"),
    (unknown_columns, "pool.csv:1: there is no column `text`"),
    (label_outside_the_set, "test.csv:22: label `crad` is not in the label set; did you mean `card`?"),
    (answer_outside_the_set, "answers.csv:170: label `crad` is not in the label set; did you mean `card`?"),
    (missing_gold_file, "label.queue.gold_file: no such file: gold.csv"),
    (gold_answer_outside_the_set, "gold.csv:3: label `crad` is not in the label set; did you mean `card`?"),
    (gold_without_answers, "label.queue.gold_file: no record of gold.csv has an answer; fill them in"),
    (
        unknown_key,
        "unknown key `train.epoch`; did you mean `train.epochs`? `posttrain config keys train` lists the keys",
    ),
    (unknown_section, "unknown key `trian`; did you mean `train`?"),
    (wrong_value, "`train.epochs`: "),
    (no_metric, "gate.deploy: rule `acuracy >= 0`: no metric `acuracy`; did you mean `accuracy`?"),
    (rule_without_metric, "gate.deploy: rule `1 >= 0` names no metric"),
    (no_rule, "`gate.deploy`: rule `accuracy >=`: something is missing at its end"),
    (no_trigger, "nothing is called `new_record`; did you mean `new_records`?"),
    (no_model, "model: `no/such/model` is not a model; give a folder, a .gguf file or a Hub id"),
    (no_model_in_the_folder, "/base: is not a model: it holds no config.json"),
    (no_gguf, "base.gguf: is not a GGUF file; give another .gguf file, a folder or a Hub id"),
    (broken_yaml, "posttrain.yaml:3: broken YAML: "),
    (no_mapping, "posttrain.yaml: holds no config"),
    (repeated_key, "broken YAML: `model` is given twice"),
    (list_as_key, "posttrain.yaml:2: broken YAML: a key must be a word"),
    (control_character, "posttrain.yaml: broken YAML: "),
    (yaml_not_utf8, "posttrain.yaml: is not UTF-8 text"),
]


def mistakes(items: list[tuple[Break, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("damage", "message"), [pytest.param(*item, id=item[0].__name__) for item in items])


@mistakes(MISTAKES)
def test_a_mistake_at_the_first_run_leaves_no_files(
    tree: Tree, small: Any, posttrain: Call, damage: Break, message: str
) -> None:
    root = small(rounds=1)
    damage(root)
    before = tree(root)
    assert message in posttrain("run", "-w", root).mistake
    after = tree(root)
    after.pop(".posttrain/format.json", None)
    assert after == before, "no artifact, nothing half-written"


@mistakes(MISTAKES[::3])
def test_a_mistake_in_a_later_round_does_not_change_the_workspace(
    tree: Tree, small: Any, finished_workspace: Path, posttrain: Call, tmp_path: Path, damage: Break, message: str
) -> None:
    root = tmp_path / "copy"
    shutil.copytree(finished_workspace, root, symlinks=True)
    original_files = {path: path.read_bytes() for path in root.iterdir() if path.is_file()}
    damage(root)
    before = tree(root)
    assert message in posttrain("run", "-w", root, "--rounds", "3").mistake
    assert tree(root) == before
    for path, content in original_files.items():
        path.write_bytes(content)
    state = posttrain("status", "-w", root, "--json").json
    assert state["champion"]["round"] == 2
    assert [entry["decision"] for entry in state["rounds"][:3]] == ["baseline", "deploy", "deploy"]


@pytest.mark.slow
def test_a_run_after_corrected_mistakes_gives_the_same_champion(
    small: Any, finished_workspace: Path, posttrain: Call
) -> None:
    root = small()
    original_files = {path: path.read_bytes() for path in root.iterdir()}
    for damage, _ in MISTAKES:
        damage(root)
        assert posttrain("run", "-w", root).code == 2
        for path, content in original_files.items():
            path.write_bytes(content)
    assert posttrain("run", "-w", root).code == 0
    states = [posttrain("status", "-w", workspace, "--json").json for workspace in (root, finished_workspace)]
    assert states[0]["champion"]["id"] == states[1]["champion"]["id"]


@pytest.mark.slow
def test_a_model_that_the_hub_does_not_have(
    small: Any, posttrain: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A missing Hub id is noticed only by the download; nothing is deployed then."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    root = small(rounds=1)
    _model(root, "nobody/nothing")
    outcome = posttrain("run", "-w", root)
    assert outcome.code == 2
    assert "model: `nobody/nothing` is not a folder, and the Hub does not give it" in outcome.err.splitlines()[-1]
    state = posttrain("status", "-w", root, "--json").json
    assert state["champion"] is None
    _model(root, "tiny")
    assert posttrain("run", "-w", root).code == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "new.jsonl: there is no such file"),
        ("", "new.jsonl: "),
        (GOOD + "{\n", "new.jsonl:2: "),
        (GOOD + '{"text": "plain"}\n', "new.jsonl:2: "),
        ('{"prompt": "a", "completion": "crad"}\n', "new.jsonl:1: label `crad` is not in the label set"),
    ],
)
def test_data_add_adds_all_files_or_none(
    tree: Tree, small: Any, posttrain: Call, tmp_path: Path, content: str | None, message: str
) -> None:
    root = small(data={"columns": None, "pool": ["p.jsonl"], "test": ["t.jsonl"]})
    (tmp_path / "good.jsonl").write_text(GOOD)
    if content is not None:
        (tmp_path / "new.jsonl").write_text(content)
    files = [tmp_path / "good.jsonl", tmp_path / "new.jsonl"]
    before = tree(root)
    assert message in posttrain("data", "add", *files, "--to", "labelled", "-w", root).mistake
    after = tree(root)
    after.pop(".posttrain/format.json", None)
    assert after == before


def test_data_add_overwrites_nothing(small: Any, posttrain: Call, tmp_path: Path) -> None:
    root = small()
    for name, text in (("a/x.csv", "text\none\n"), ("b/x.csv", "text\ntwo\n"), ("c/.hidden.csv", "text\nthree\n")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    message = posttrain("data", "add", tmp_path / "a/x.csv", tmp_path / "b/x.csv", "-w", root).mistake
    assert "another file of this name was added before; rename yours" in message
    assert not (root / "data").exists()
    assert "only plain files" in posttrain("data", "add", tmp_path / "c/.hidden.csv", "-w", root).mistake
    assert posttrain("data", "add", tmp_path / "a/x.csv", "-w", root).code == 0
    assert "rename yours" in posttrain("data", "add", tmp_path / "b/x.csv", "-w", root).mistake
    assert (root / "data" / "pool" / "x.csv").read_text() == "text\none\n"
