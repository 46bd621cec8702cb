"""``posttrain.Workspace`` does what the command line does, on the same workspace, also while it runs."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain import UserError, WorkError, Workspace
from posttrain.cli.main import main
from posttrain.store.workspace import Workspace as Store

pytestmark = pytest.mark.slow


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``command(*arguments)``: the JSON that a command prints."""

    def call(*arguments: object) -> Any:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([*map(str, arguments), "--json"])
        assert stop.value.code == 0
        return json.loads(capsys.readouterr().out)

    return call


@pytest.fixture(scope="module")
def waiting_root(small_anywhere: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace whose round 1 waits for 12 labels."""
    root = small_anywhere(tmp_path_factory.mktemp("waiting"))(label={"annotator": "people"})
    waiting = Workspace(root).run()
    assert waiting is not None
    assert waiting.startswith("labels for round 1: fill the label column of labels/round-1.csv (12 records)")
    return root


@pytest.fixture
def waiting(waiting_root: Path, tmp_path: Path) -> Workspace:
    return Workspace(shutil.copytree(waiting_root, tmp_path / "waiting", symlinks=True))


def right_answers(workspace: Workspace) -> dict[str, str]:
    with (workspace.path / "answers.csv").open(encoding="utf-8") as file:
        return {row["text"]: row["label"] for row in csv.DictReader(file)}


def test_reading_gives_what_the_commands_print(finished_copy: Path, command: Callable[..., Any]) -> None:
    workspace = Workspace(finished_copy)
    assert workspace.status() == command("status", "-w", finished_copy)
    assert workspace.models.list() == command("models", "list", "-w", finished_copy)
    assert workspace.models.champion == workspace.status()["champion"]["id"]
    chosen = workspace.select(5, "entropy")
    assert chosen == command("select", "--n", 5, "--strategy", "entropy", "-w", finished_copy)
    assert len(chosen["records"]) == 5
    numbers = [record["scores"] for record in chosen["records"]]
    assert all({"entropy", "least_confidence", "margin", "confidence"} <= set(scores) for scores in numbers)
    ranked = [
        scores["entropy"]
        for record, scores in zip(chosen["records"], numbers, strict=True)
        if record["reason"] == "strategy"
    ]
    assert len(ranked) > 1
    assert ranked == sorted(ranked, reverse=True)


def test_a_loop_driven_from_python_ends_as_one_of_the_command_line(
    waiting: Workspace, tmp_path: Path, command: Callable[..., Any]
) -> None:
    other = Path(shutil.copytree(waiting.path, tmp_path / "other", symlinks=True))
    answers = right_answers(waiting)
    assert waiting.label(lambda record: answers[record["input"]]) == (12, 12)
    assert waiting.run(rounds=1) is None
    file = other / "labels" / "round-1.csv"
    with file.open(encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, rows[0])
        writer.writeheader()
        writer.writerows({**row, "label": answers[row["prompt"]]} for row in rows)
    with pytest.raises(SystemExit):
        main(["run", "--rounds", "1", "-w", str(other)])
    mine, theirs = waiting.status(), command("status", "-w", other)
    assert mine["champion"]["id"] == theirs["champion"]["id"]
    assert [entry["metrics"] for entry in mine["rounds"]] == [entry["metrics"] for entry in theirs["rounds"]]
    assert (waiting.path / ".posttrain" / "run.log").read_text(encoding="utf-8").count("deploy:") == 1


@pytest.mark.parametrize("form", ["mapping", "dictionaries", "function"])
def test_labels_come_in_three_forms_and_in_parts(waiting: Workspace, form: str) -> None:
    answers = right_answers(waiting)
    batch = waiting.batch()
    assert all(record["label"] is None for record in batch)
    first, rest = batch[:4], batch[4:]
    given: Any
    for part, count in ((first, 4), (rest, 12)):
        labels = {record["id"]: answers[record["input"]] for record in part}
        if form == "mapping":
            given = labels
        elif form == "dictionaries":
            given = [{"id": id, "label": label, "note": "x"} for id, label in labels.items()]
        else:
            given = lambda record, labels=labels: labels.get(record["id"])  # noqa: E731
        assert waiting.label(given) == (count, 12)
    assert [record["label"] for record in waiting.batch()] == [answers[record["input"]] for record in batch]
    with Store.open(waiting.path) as store:
        assert store.metadata.rounds()[-1].status == "waiting"
    assert (waiting.run(until="label"), waiting.status()["rounds"][-1]["status"]) == (None, "open")


def test_labels_keep_what_people_have_written_beside_them(waiting: Workspace) -> None:
    file = waiting.path / "labels" / "round-1.csv"
    with file.open(encoding="utf-8", newline="") as opened:
        rows = [{**row, "note": f"note {number}"} for number, row in enumerate(csv.DictReader(opened))]
    rows[0]["label"] = "card"
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, rows[0], delimiter=";")
        writer.writeheader()
        writer.writerows(rows)
    assert waiting.label({rows[1]["id"]: "cash"}) == (2, 12)
    with file.open(encoding="utf-8", newline="") as opened:
        after = list(csv.DictReader(opened))
    assert after == [rows[0], {**rows[1], "label": "cash"}, *rows[2:]]


LABEL_MISTAKES: list[tuple[Any, str]] = [
    ({"nothing": "card"}, "labels: no record of the batch has the id `nothing`"),
    (lambda record: "crad", "labels: label `crad` of record ID is not in the label set; did you mean `card`?"),
    (lambda record: 3, "labels: the label of record ID is int and no text"),
    ([{"id": "a"}], "labels[0]: is not a dictionary with `id` and `label`"),
    ([{"id": "a", "label": "card"}] * 2, "labels[1]: record a has a label already"),
    ("card", "labels: str holds no labels; give a mapping from id to label, dictionaries with `id` and `label`, or a "),
]


@pytest.mark.parametrize(("answers", "message"), LABEL_MISTAKES)
def test_wrong_labels_are_one_line_and_store_nothing(waiting: Workspace, answers: Any, message: str) -> None:
    before = (waiting.path / "labels" / "round-1.csv").read_bytes()
    with pytest.raises(UserError) as caught:
        waiting.label(answers)
    assert str(caught.value).startswith(message.replace("ID", waiting.batch()[0]["id"]))
    assert (waiting.path / "labels" / "round-1.csv").read_bytes() == before


def test_without_a_batch_there_is_nothing_to_label(finished_copy: Path) -> None:
    for call in (Workspace(finished_copy).batch, lambda: Workspace(finished_copy).label({})):
        with pytest.raises(UserError, match=r"^no round waits for labels; posttrain status$"):
            call()


def test_models_are_promoted_rolled_back_loaded_and_exported(finished_copy: Path, tmp_path: Path) -> None:
    models = Workspace(finished_copy).models
    base, first, second = (row["id"] for row in models.list())
    assert models.champion == second
    assert models.rollback(reason="complaints") == first
    assert models.rollback() == first  # the same one, done
    assert models.rollback("round 0") == base
    assert models.promote(second[:12]) == second == models.champion
    assert (finished_copy / ".posttrain" / "champion").resolve().name == second
    model, tokenizer = models.load(first)
    prompt = tokenizer("my card", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[0] == 1
    folder = models.export("champion", tmp_path / "export")
    assert not (folder / "README.md").exists()
    with pytest.raises(UserError, match="the folder exists already"):
        models.export("champion", folder)
    with pytest.raises(UserError, match="nothing here is called `model-x`"):
        models.load("model-x")


def test_nothing_is_held_between_calls(finished_copy: Path, command: Callable[..., Any], tmp_path: Path) -> None:
    workspace = Workspace(finished_copy)
    workspace.status()
    with Store.open(finished_copy) as store, store.hold("loop", "busy"):
        # Another process works: what reads continues, and what runs says so.
        assert workspace.status()["round"] == 2
        with pytest.raises(UserError, match="another process runs this loop"):
            workspace.run()
    assert workspace.report(tmp_path / "page.html") == tmp_path / "page.html"
    with pytest.raises(UserError, match="there is no such folder; make it first"):
        workspace.report(tmp_path / "none" / "page.html")
    moved = finished_copy.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"no posttrain\.yaml here"):
        workspace.status()
    assert Workspace(moved).status()["round"] == 2


def test_create_writes_the_config_and_refuses_a_wrong_one(tmp_path: Path) -> None:
    config = {"model": "tiny", "data": {"pool": Path("pool.csv"), "test": ("a.csv", "b.csv")}, "rounds": 1}
    root = tmp_path / "new" / "workspace"
    with pytest.raises(UserError, match="config: unknown key `modle`"):
        Workspace.create(root, {**config, "modle": "tiny"})
    assert not root.parent.exists()
    workspace = Workspace.create(root, config)
    written = {"model": "tiny", "data": {"pool": "pool.csv", "test": ["a.csv", "b.csv"]}, "rounds": 1}
    assert yaml.safe_load((root / "posttrain.yaml").read_text(encoding="utf-8")) == written
    assert workspace.status()["rounds"] == []
    with pytest.raises(UserError, match="a workspace is here already"):
        Workspace.create(root, config)
    with pytest.raises(UserError, match=r"pool\.csv"):
        workspace.run()


def test_a_folder_without_a_config_is_no_workspace(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Workspace(tmp_path)
    fix = f"posttrain.Workspace.create('{tmp_path}', config), or posttrain init {tmp_path}"
    assert str(caught.value) == f"{tmp_path}: no posttrain.yaml here; {fix}"
    assert issubclass(WorkError, Exception)


def test_mistakes_name_the_argument_and_not_an_option(finished_copy: Path) -> None:
    workspace = Workspace(finished_copy)
    for call, message in (
        (lambda: workspace.run(until="trian"), "until: no stage `trian`; one of "),
        (lambda: workspace.select(strategy="entropi"), "strategy: `strategy`: no strategy `entropi`; did you mean "),
        (lambda: workspace.select(0), "n: 0 records are none; give 1 or more"),
        (lambda: workspace.models.rollback("round 9"), "round 9 trained no model; posttrain models list"),
    ):
        with pytest.raises(UserError) as caught:
            call()
        assert str(caught.value).startswith(message)
