"""``posttrain merge`` with data: --search and --validate, and mistakes named before any work."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from model_family import write_relative

from posttrain.models.tiny import write_tiny_model

Call = Callable[..., Any]

LABELS = ["card", "cash", "loan"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``, ``a`` and ``b``, trained from it, as it were, and what they are measured on."""
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "base")
    for seed, name in enumerate("ab"):
        write_relative(root / name, root / "base", seed, scale=0.05)
    rows = [{"prompt": f"{number} of my {LABELS[number % 3]}", "completion": LABELS[number % 3]} for number in range(8)]
    (root / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suites = {"suites": {"choice": {"data": "records.jsonl", "task": {"labels": LABELS}}}}
    (root / "suites.yaml").write_text(yaml.safe_dump(suites))
    return root


@pytest.fixture
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with links to the models and files."""
    for name in ("base", "a", "b", "records.jsonl", "suites.yaml"):
        (tmp_path / name).symlink_to(models / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_search_ends_in_a_recipe_of_its_own(posttrain: Call, here: Path) -> None:
    recipe = {
        "method": "ties",
        "base": "base",
        "models": ["a", "b"],
        "search": {"trials": 4, "suites": ["suites.yaml"]},
    }
    (here / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    result = posttrain("merge", "recipe.yaml", "--out", "one", "--json")
    assert result.code == 0, result
    report = result.json["search"]
    assert report == json.loads((here / "one" / "search.json").read_text())
    assert report["trials"] == 4
    assert report["held_out"]["choice"]["gain"]["n"] == 4
    assert len((here / "one" / "search.jsonl").read_text().splitlines()) == 4
    # The recipe in merge.json gives the same model without suites.
    (here / "again.yaml").write_text(yaml.safe_dump(json.loads((here / "one" / "merge.json").read_text())["recipe"]))
    assert posttrain("merge", "again.yaml", "--out", "two").code == 0
    one, two = ((here / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    # The options say the same, and the search leaves nothing beside the model.
    options = ("--method", "ties", "--base", "base", "--search", "suites.yaml", "--trials", "4", "--out", "three")
    result = posttrain("merge", "a", "b", *options)
    assert "best of 4 merges: weight 1 " in result.out
    assert "choice, records not searched on: " in result.out
    assert json.loads((here / "three" / "search.json").read_text()) == report
    names = {path.name for path in here.iterdir()}
    assert not {name for name in names if name.endswith(".search") or name.startswith(".")}


@pytest.mark.slow
def test_the_page_of_conflicts_shows_what_was_kept(posttrain: Call, here: Path) -> None:
    call = ("merge", "a", "b", "--base", "base", "--conflicts", "page.html", "--out", "out")
    result = posttrain(*call, "--validate", "suites.yaml", "--json")
    assert result.code == 0, result
    choice = result.json["validation"]["suites"]["choice"]
    page = (here / "page.html").read_text()
    assert "Capability preserved" in page
    assert f">{choice['scores']['merged']:.3f}</td>" in page
    assert f">{100 * choice['retention']['ratio']:.1f}%</td>" in page
    assert len(page) < 2_000_000
    plain = posttrain(*call[:-1], "plain")
    assert plain.code == 0
    assert "model: plain" in plain.out
    assert "Capability preserved" not in (here / "page.html").read_text()


def test_a_suite_of_the_workspace_is_named_by_its_name(
    posttrain: Call, finished_workspace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    call = ("merge", "champion", "round 1", "-w", finished_workspace, "--out", out)
    result = posttrain(*call, "--validate", "test", "--json")
    assert result.code == 0, result
    assert result.json["validation"]["suites"]["test"]["metric"] == "accuracy"
    assert (
        "there is no file and no suite `tset`"
        in posttrain(
            "merge", "champion", "-w", finished_workspace, "--out", tmp_path / "x", "--validate", "tset"
        ).mistake
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--validate", "suites.yaml", "--dry-run"], "--validate: needs a merged model; name an --out, and leave out"),
        (["--trials", "3"], "--trials: there is no search; name a file of suites or records with --search"),
        (["--search", "none.jsonl"], "no such file: none.jsonl"),
        (
            ["--search", "suites.yaml", "--method", "adamerging", "--base", "base"],
            "there is no merge method `adamerging`",
        ),
        (["--validate", "none.jsonl"], "no such file: none.jsonl"),
        (["--validate", "suites.yaml", "--validate", "choice=records.jsonl"], "there are two suites `choice`"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    posttrain: Call, here: Path, arguments: list[str], message: str
) -> None:
    before = sorted(here.iterdir())
    assert message in posttrain("merge", "a", "b", "--out", "x", *arguments).mistake
    assert sorted(here.iterdir()) == before
