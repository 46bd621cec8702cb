"""The verbs notice a lost database and damaged files, and say what to do."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.feedback.entries import Feedback
from posttrain.data.feedback.inbox import Inbox

pytestmark = pytest.mark.slow

Call = Callable[..., Any]


@pytest.fixture
def copy(finished_workspace: Path, tmp_path: Path) -> Path:
    """A copy of a workspace after two rounds."""
    root = tmp_path / "copy"
    shutil.copytree(finished_workspace, root, symlinks=True)
    return root


def artifact(root: Path, kind: str) -> Path:
    """The first artifact of a kind."""
    return next(iter(sorted(root.glob(f".posttrain/artifacts/{kind}-*"))))


def weights(root: Path) -> Path:
    return (root / ".posttrain" / "champion").resolve() / "model.safetensors"


def write(file: Path, content: bytes) -> None:
    file.chmod(0o644)
    file.write_bytes(content)


def flip(file: Path) -> None:
    write(file, file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))


OPENING = (
    *(
        ["run"],
        ["eval"],
        ["status"],
        ["show", "champion"],
        ["report", "page.html"],
        ["select"],
        ["serve", "--port", "0"],
    ),
    *(["data", "list"], ["data", "add", "pool.csv", "--name", "x"], ["data", "gc"], ["label", "report"]),
    *(["models", "list"], ["models", "promote", "model"], ["models", "rollback"], ["models", "export", "model", "out"]),
)


@pytest.mark.parametrize("arguments", OPENING, ids=" ".join)
def test_no_verb_takes_a_lost_database_for_a_new_one(
    posttrain: Call, copy: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy)
    database = copy / ".posttrain" / "store.db"
    for content in (None, b""):
        database.unlink()
        if content is not None:
            database.write_bytes(content)
        mistake = posttrain(*arguments, "-w", copy).mistake
        assert mistake.startswith(f"{database}: the database is {'missing' if content is None else 'empty'}, but")
        assert f"posttrain verify --rebuild -w {copy}" in mistake
        database.touch()


def test_a_lost_database_is_rebuilt_and_the_loop_goes_on(posttrain: Call, copy: Path) -> None:
    before = posttrain("status", "-w", copy, "--json").json
    (copy / ".posttrain" / "store.db").unlink()
    lost = posttrain("verify", "-w", copy)
    assert (lost.code, lost.out.count("\n")) == (1, 1)
    assert "the database is missing" in lost.out
    rebuilt = posttrain("verify", "--rebuild", "-w", copy)
    assert (rebuilt.code, "3 rounds" in rebuilt.out, "unknown" in rebuilt.out) == (0, True, False)
    assert posttrain("status", "-w", copy, "--json").json == before
    assert posttrain("verify", "-w", copy).code == 0
    assert "1 of 1" not in posttrain("run", "--rounds", "3", "-w", copy).err
    after = posttrain("status", "-w", copy, "--json").json
    assert [entry["round"] for entry in after["rounds"]] == [0, 1, 2, 3]
    assert after["rounds"][:3] == before["rounds"]
    assert posttrain("verify", "--rebuild", "-w", copy).out == "the database is healthy: nothing to rebuild\n"


def test_a_healthy_workspace(posttrain: Call, copy: Path) -> None:
    with Inbox(copy / ".posttrain" / "inbox") as inbox:
        inbox.append(Feedback(id="a", prompt="p", completion="c", rating="up")).result()
    (copy / ".posttrain" / "tmp" / "of-a-killed-process").mkdir()
    outcome = posttrain("verify", "-w", copy)
    assert outcome.code == 0
    assert outcome.out.startswith("no damage: ")
    assert outcome.out.endswith(", 1 feedback entries\n")
    result = posttrain("verify", "-w", copy, "--json").json
    assert result["findings"] == []
    assert min(result["checked"].values()) > 0
    assert posttrain("verify", "--quick", "-w", copy).code == 0
    assert posttrain("verify", "-w", copy / "none").code == 2


def test_each_finding_is_one_line(posttrain: Call, copy: Path) -> None:
    home = copy / ".posttrain"
    labels, chunk = artifact(copy, "labels"), sorted(home.glob("scores*/*/*/*.chunk"))[0]
    flip(labels / "labels.parquet")
    flip(chunk)
    with closing(sqlite3.connect(home / "store.db", isolation_level=None)) as connection:
        connection.execute("UPDATE rounds SET detail = json_set(detail, '$.metrics.accuracy', 0.99) WHERE number = 1")
    (home / "champion").unlink()
    outcome = posttrain("verify", "-w", copy)
    lines = outcome.out.splitlines()
    assert outcome.code == 1
    assert [line.partition(": ")[0] for line in lines] == [
        f"{home}/store.db, rounds, row 1",
        labels.name,
        "round 1, metrics",
        "round 1, metrics",
        str(home / "champion"),
        str(chunk),
    ]
    assert "`accuracy` is 0.99, but " in lines[2]
    assert "in evaluation-" in lines[2]
    assert "in decision-" in lines[3]
    assert all("; " in line for line in lines)
    found = posttrain("verify", "-w", copy, "--json")
    assert found.code == 1
    assert [f"{entry['where']}: {entry['what']}; {entry['fix']}" for entry in found.json["findings"]] == lines
    # A flipped bit changes no size.
    assert not any(labels.name in line for line in posttrain("verify", "--quick", "-w", copy).out.splitlines())


def test_verify_changes_nothing(posttrain: Call, copy: Path, tree: Callable[[Path], dict[str, str]]) -> None:
    flip(weights(copy))
    before = tree(copy)
    for options in ([], ["--quick"], ["--json"]):
        assert posttrain("verify", "-w", copy, *options).code == (0 if options == ["--quick"] else 1)
    assert tree(copy) == before


def test_reading_a_finished_workspace_imports_no_torch(posttrain: Call, copy: Path) -> None:
    """In one process: each verb adds its modules to those of the verbs before."""
    # Scores the pool by the last round's champion, as the next round would.
    assert posttrain("select", "-w", copy).code == 0
    verbs = [
        "verify",
        "status",
        f"report {copy}/report.html",
        "config check",
        "models list",
        "show champion",
        "data list",
        "select --n 3",
    ]
    code = (
        "import sys\nfrom posttrain.cli.main import main\n"
        f"for verb in {verbs}:\n"
        f"    try: main([*verb.split(), '-w', {str(copy)!r}])\n"
        "    except SystemExit as end: assert not end.code, verb\n"
        "print('imported', sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["imported []"]), done.stderr


@pytest.mark.parametrize("damage", ["truncate", "delete", "delete the folder"])
def test_a_damaged_champion_is_named_by_every_verb(posttrain: Call, copy: Path, damage: str, tmp_path: Path) -> None:
    file = weights(copy)
    if damage == "truncate":
        os.truncate(file, 100)
    elif damage == "delete":
        file.unlink()
    else:
        shutil.rmtree(file.parent)
    problem = {"truncate": "model.safetensors has 100 bytes instead of", "delete": "model.safetensors is missing"}
    text = problem.get(damage, "leads nowhere")
    for arguments in (["status"], ["models", "list"]):
        outcome = posttrain(*arguments, "-w", copy)
        assert outcome.code == 0
        assert f"the champion is damaged: {text}" in outcome.out
        assert "posttrain models rollback" in outcome.out
        champion = outcome = posttrain(*arguments, "-w", copy, "--json").json
        if arguments == ["status"]:
            assert text in champion["champion"]["damage"][0]
        else:
            assert [bool(entry["damage"]) for entry in outcome] == [entry["champion"] for entry in outcome]
    assert "damaged: " in posttrain("show", "champion", "-w", copy).out
    assert posttrain("report", tmp_path / "page.html", "-w", copy).code == 0
    assert "The champion is damaged: " in (tmp_path / "page.html").read_text(encoding="utf-8")
    for arguments in (["eval"], ["run"], ["models", "export", "champion", str(tmp_path / "out")]):
        outcome = posttrain(*arguments, "-w", copy)
        assert outcome.code == 1
        assert file.parent.name in outcome.err
    assert not (tmp_path / "out").exists()


def test_a_damaged_base_model_in_service_is_fetched_again(posttrain: Call, small: Any) -> None:
    """No earlier champion could take its place."""
    root = small(rounds=1, gate={"deploy": ["accuracy > 2"]})
    assert posttrain("run", "-w", root).code == 0
    flip(weights(root))
    assert posttrain("models", "rollback", "-w", root).mistake.startswith("there is no earlier champion")
    outcome = posttrain("run", "-w", root)
    assert outcome.code == 0
    assert "is damaged: model.safetensors differs from its checksum; fetching it again" in outcome.err
    assert posttrain("verify", "-w", root).code == 0


def test_a_flipped_bit_stops_eval_export_and_promotion(posttrain: Call, copy: Path, tmp_path: Path) -> None:
    champion = weights(copy).parent.name
    assert posttrain("models", "rollback", "-w", copy).code == 0
    assert weights(copy).parent.name != champion
    flip(copy / ".posttrain" / "artifacts" / champion / "model.safetensors")
    for arguments in (
        ["eval", "--model", champion],
        ["models", "export", champion, str(tmp_path / "out")],
        ["models", "promote", champion],
    ):
        outcome = posttrain(*arguments, "-w", copy)
        assert outcome.code == 1
        assert f"{champion} is damaged: model.safetensors differs from its checksum" in outcome.err
        assert "posttrain verify lists all damage and what to do" in outcome.err
    # Nothing was promoted.
    assert posttrain("verify", "-w", copy).out.count("\n") == 1


def test_an_exported_model_can_be_changed(posttrain: Call, copy: Path, tmp_path: Path) -> None:
    assert posttrain("models", "export", "champion", tmp_path / "out", "-w", copy).code == 0
    assert weights(copy).stat().st_mode & 0o777 == 0o444
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o200


def test_a_damaged_evaluation_costs_its_part_of_the_report(posttrain: Call, copy: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert posttrain("report", page, "-w", copy).code == 0
    whole = page.read_text(encoding="utf-8")
    assert "recall of each class" in whole
    for folder in copy.glob(".posttrain/artifacts/evaluation-*"):
        (folder / "evaluation.json").unlink()
    assert posttrain("report", page, "-w", copy).code == 0
    rest = page.read_text(encoding="utf-8")
    assert "Classes and confusions are missing: artifact evaluation-" in rest
    assert "recall of each class" not in rest
    assert "Each mark is the candidate of a round" in rest


def test_deleted_datasets_are_built_again(posttrain: Call, copy: Path) -> None:
    datasets = {path.name for path in copy.glob(".posttrain/artifacts/dataset-*")}
    for name in datasets:
        shutil.rmtree(copy / ".posttrain" / "artifacts" / name)
    assert posttrain("verify", "-w", copy).code == 1
    assert posttrain("show", "champion", "-w", copy).code == 0
    outcome = posttrain("run", "--rounds", "3", "-w", copy)
    assert outcome.code == 0, outcome
    assert datasets <= {path.name for path in copy.glob(".posttrain/artifacts/dataset-*")}
    assert posttrain("verify", "-w", copy).code == 0
