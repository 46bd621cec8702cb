"""``posttrain models rollback``: which model returns, what is printed, and what is asked first."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed_verbs import prepare_models, registry_outcome

Call = Callable[..., Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Models of rounds 0 to 2, the last one in service, and one that never was."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    prepare_models(folder)
    return folder


def champion(root: Path) -> str:
    return str(registry_outcome(root)["champion"])


def test_it_prints_the_rounds_and_their_metric(posttrain: Call, root: Path) -> None:
    outcome = posttrain("models", "rollback", "-w", root)
    assert outcome.code == 0, outcome
    assert outcome.out.splitlines()[0] == "round 2 (60.0%) → round 1 (35.0%)"
    assert champion(root) == "model 1"


def test_typed_twice_it_goes_back_once_and_says_so(posttrain: Call, root: Path) -> None:
    posttrain("models", "rollback", "-w", root)
    before = registry_outcome(root)
    outcome = posttrain("models", "rollback", "-w", root)
    assert outcome.code == 0, outcome
    line = "round 2 (60.0%) → round 1 (35.0%) was done before; to go further back, name the model with --to"
    assert outcome.out.splitlines()[0] == line
    assert registry_outcome(root) == before


@pytest.mark.parametrize("to", [["round 1"], ["round", "1"], ["1"]])
def test_to_names_a_round(posttrain: Call, root: Path, to: list[str]) -> None:
    for _ in range(2):
        assert posttrain("models", "rollback", "-w", root, "--to", *to).code == 0
    assert champion(root) == "model 1"
    assert len(registry_outcome(root)["deployments"]) == 4


def test_to_takes_the_id_of_a_model_and_leads_back_and_forth(posttrain: Call, root: Path) -> None:
    ids = [row[0] for row in registry_outcome(root)["deployments"]]
    for number in (0, 2):
        assert posttrain("models", "rollback", "-w", root, "--to", ids[number], "--yes").code == 0
        assert champion(root) == f"model {number}"
    outcome = posttrain("models", "rollback", "-w", root, "--to", "champion")
    assert outcome.out.splitlines()[0].endswith("round 2 (60.0%) was done before")


def test_the_base_model_needs_a_yes(posttrain: Call, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = registry_outcome(root)
    what = "round 2 (60.0%) → round 0 (10.0%) puts the base model in service, which is not trained on your task"
    line = posttrain("models", "rollback", "-w", root, "--to", "round 0").mistake
    assert line == f"{what}; add --yes if that is meant, or name another model with --to"
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    for answer, code in ((False, 2), (True, 0)):
        assert registry_outcome(root) == before
        monkeypatch.setattr("typer.confirm", lambda text, answer=answer: answer)
        assert posttrain("models", "rollback", "-w", root, "--to", "round 0").code == code
    assert champion(root) == "model 0"
    # Done already, so that there is nothing to ask.
    monkeypatch.undo()
    assert posttrain("models", "rollback", "-w", root).code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "round 9"], "round 9 trained no model; posttrain models list"),
        (["--to", "nothing"], "nothing here is called `nothing`"),
        (["1"], "unexpected argument `1`; name the model with --to"),
        (["--to", "round", "x"], "nothing here is called `round x`"),
    ],
)
def test_unusable_targets_are_refused(posttrain: Call, root: Path, options: list[str], message: str) -> None:
    before = registry_outcome(root)
    assert message in posttrain("models", "rollback", "-w", root, *options).mistake
    assert registry_outcome(root) == before
