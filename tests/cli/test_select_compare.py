"""``posttrain select compare``, on files and on the labels of the loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.slow

Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts no processes: these curves take less than their start."""
    monkeypatch.setattr("posttrain.select.strategy_comparison.available_cores", lambda: 1)


def test_strategies_are_compared_on_a_file(small: Any, posttrain: Call, tmp_path: Path) -> None:
    answers = tmp_path / "answers.csv"
    small.write(answers, small.rows()[:80])
    command = ["select", "compare", answers, "--column", "prompt=text", "--column", "completion=label"]
    settings = ["--strategies", "margin,facility_location", "--seeds", "2", "--batch", "8", "--labels", "16"]
    result = posttrain(*command, *settings, "--json").json
    assert result["counts"] == [8, 16]
    assert {entry["strategy"] for entry in result["summaries"]} == {"random", "margin", "facility_location"}
    assert result["summaries"] == sorted(result["summaries"], key=lambda entry: -entry["area"])
    output = posttrain(*command, *settings).out
    assert "facility_location" in output
    assert result["advice"] in " ".join(output.split())


def test_strategies_are_compared_on_the_labels_of_the_loop(finished_copy: Path, posttrain: Call) -> None:
    root = finished_copy
    compare = ["select", "compare", "-w", root, "--seeds", "2", "--batch", "4", "--labels", "8", "--json"]
    result = posttrain(*compare, "--strategies", "margin").json
    assert result["counts"] == [4, 8]
    champion_result = posttrain(*compare, "--strategies", "margin", "--embedder", "champion").json
    assert champion_result == result
    sentence_result = posttrain(*compare, "--strategies", "margin", "--embedder", "minilm").json
    assert sentence_result["full_accuracy"] != result["full_accuracy"]
    config = root / "posttrain.yaml"
    settings = yaml.safe_load(config.read_text())
    settings.setdefault("select", {})["embeddings"] = "minilm"
    config.write_text(yaml.safe_dump(settings))
    assert posttrain(*compare, "--strategies", "margin").json == sentence_result
    assert "--column: there is no file" in posttrain(*compare, "--column", "prompt=text").mistake


def test_a_comparison_needs_a_run_and_labels(small: Any, posttrain: Call) -> None:
    root = small()
    compare = ["select", "compare", "-w", root]
    assert posttrain(*compare).mistake.startswith(f"{root}: nothing has run here yet")
    assert posttrain("run", "-w", root, "--rounds", "0").code == 0
    assert "nothing has been labelled here yet" in posttrain(*compare).mistake


def test_options_before_the_verb_are_refused(posttrain: Call) -> None:
    message = posttrain("select", "--n", "3", "compare").mistake
    assert message == "`--n` stands before `compare`, which does not see it; put it behind `compare`"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "margn"], "no strategy `margn`; did you mean `margin`?"),
        (["--embedder", "no-such-model"], "no-such-model"),
        (["nothing.csv"], "nothing.csv"),
    ],
)
def test_unusable_arguments_of_compare_are_refused_in_one_line(
    small: Any, posttrain: Call, arguments: list[str], message: str
) -> None:
    answers = small() / "answers.csv"
    columns = ["--column", "prompt=text", "--column", "completion=label"]
    assert message in posttrain("select", "compare", answers, *columns, *arguments).mistake
