"""``posttrain init DIR --test FILE --pool FILE`` proposes a config for the user's files."""

import compileall
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import posttrain as posttrain_package

Call = Callable[..., Any]

TOPICS = ("card lost", "refund", "price: high")


def write_csv(path: Path, header: str, count: int = 12, start: int = 0) -> None:
    lines = [f"how is it with {start + number},{TOPICS[number % 3]},{number}" for number in range(count)]
    width = header.count(",") + 1
    path.write_text("\n".join([header, *(",".join(line.split(",")[:width]) for line in lines)]) + "\n", "utf-8")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "test.csv", "text,label")
    write_csv(tmp_path / "pool.csv", "text", 30, 100)
    return tmp_path


def config_of(root: Path) -> Any:
    text = (root / "posttrain.yaml").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 25
    return yaml.safe_load(text)


def require_accepted(root: Path, posttrain: Call) -> None:
    """Checks with the tiny model, as the packaged one may not be installed."""
    path = root / "posttrain.yaml"
    path.write_text(path.read_text("utf-8").replace("smollm2-135m", "tiny", 1), encoding="utf-8")
    outcome = posttrain("config", "check", "-w", root)
    assert outcome.code == 0, outcome


@pytest.mark.parametrize("directory", ["work", "deep/er/work", "."])
def test_columns_and_labels_are_detected(folder: Path, posttrain: Call, directory: str) -> None:
    outcome = posttrain("init", directory, "--test", "test.csv", "--pool", "pool.csv")
    assert outcome.code == 0, outcome
    root = folder / directory
    assert (root / "labels.txt").read_text().splitlines() == sorted(TOPICS)
    config = config_of(root)
    assert config["data"]["columns"] == {"prompt": "text", "completion": "label"}
    assert (root / config["data"]["pool"]).samefile(folder / "pool.csv")
    assert config["label"]["per_round"] == 10, "three rounds of a pool of 30"
    assert "test.csv: test, 12 records, prompts in `text`, answers in `label` (3 different labels)" in outcome.out
    assert f"posttrain config check -w {directory}" in outcome.out.splitlines()[-1]
    require_accepted(root, posttrain)


def test_free_answers_give_the_template_answer(folder: Path, posttrain: Call) -> None:
    rows = [{"question": f"what is {n} + {n}", "answer": f"it is {2 * n}", "page": n} for n in range(20)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pool = "".join(json.dumps({"question": f"what is {n} - {n}"}) + "\n" for n in range(20))
    (folder / "pool.jsonl").write_text(pool, encoding="utf-8")
    outcome = posttrain("init", "work", "--test", "test.jsonl", "--pool", "pool.jsonl")
    assert outcome.code == 0, outcome
    assert "not used: page" in outcome.out
    assert "20 answers are too few to know labels from free text; if they are labels, add --template" in outcome.out
    config = config_of(folder / "work")
    assert config["data"]["columns"] == {"prompt": "question", "completion": "answer"}
    assert "labels" not in config["task"]
    assert not (folder / "work" / "labels.txt").exists()
    require_accepted(folder / "work", posttrain)


def test_shapes_that_are_known_need_no_columns(folder: Path, posttrain: Call) -> None:
    def turns(number: int, answer: str | None) -> str:
        messages = [{"role": "user", "content": f"question {number}"}]
        return json.dumps({"messages": [*messages, *([{"role": "assistant", "content": answer}] if answer else [])]})

    test = "".join(turns(number, TOPICS[number % 3]) + "\n" for number in range(12))
    (folder / "test.jsonl").write_text(test, encoding="utf-8")
    (folder / "pool.jsonl").write_text("".join(turns(n, None) + "\n" for n in range(50, 60)), encoding="utf-8")
    outcome = posttrain("init", "work", "--test", "test.jsonl", "--pool", "pool.jsonl")
    assert outcome.code == 0, outcome
    assert "columns" not in config_of(folder / "work")["data"]
    assert (folder / "work" / "labels.txt").read_text().splitlines() == sorted(TOPICS)
    require_accepted(folder / "work", posttrain)


def test_unusual_names_are_told_apart_by_their_content(folder: Path, posttrain: Call) -> None:
    for name, start in (("test.csv", 0), ("pool.csv", 50)):
        write_csv(folder / name, "what they wrote,topic", start=start)
    assert posttrain("init", "work", "--test", "test.csv", "--pool", "pool.csv").code == 0
    assert config_of(folder / "work")["data"]["columns"] == {"prompt": "what they wrote", "completion": "topic"}


def test_labelled_records_alone_hold_out_a_share(folder: Path, posttrain: Call) -> None:
    os.rename("test.csv", "labelled.csv")
    assert posttrain("init", "work", "--labelled", "labelled.csv", "--pool", "pool.csv").code == 0
    assert config_of(folder / "work")["data"]["test"] == 0.2
    require_accepted(folder / "work", posttrain)


def test_labels_of_all_files_count(folder: Path, posttrain: Call) -> None:
    with (folder / "pool.csv").open("w") as file:
        file.write("text,label\n" + "".join(f"message {number},rare\n" for number in range(4)))
    outcome = posttrain("init", "work", "--test", "test.csv", "--pool", "pool.csv")
    assert (folder / "work" / "labels.txt").read_text().splitlines() == sorted([*TOPICS, "rare"])
    assert "answers in `label` are hidden; name it as --labelled" in outcome.out
    assert "note: 1 of 4 labels occur in no test record: rare" in outcome.out


@pytest.mark.parametrize(
    ("options", "mistake"),
    [
        ("--test two.csv --pool pool.csv", "two.csv:1: cannot tell prompts and answers apart in the columns"),
        ("--test two.csv --pool pool.csv", "label, category; say which with --prompt COLUMN --label COLUMN"),
        ("--test two.csv --pool pool.csv --label labl", "there is no column `labl`; the columns are text, label"),
        ("--test pool.csv --pool pool.csv", "pool.csv:1: there are no answers: `text` is the only column"),
        ("--test test.csv --pool other.csv", "other.csv: the prompts are in `text` of test.csv, and here are"),
        ("--test test.csv --pool test.csv", "data.pool: all 12 inputs are also in what models are measured on"),
        ("--test test.csv --pool none.csv", "none.csv: there is no such file"),
        ("--test empty.csv --pool pool.csv", "empty.csv: the file holds no records"),
        ("--test pairs.jsonl --pool pool.csv", "pairs.jsonl: the records are pairs of answers"),
        ("--pool pool.csv", "--test: no file of records with answers is named"),
        ("--test test.csv", "--pool: no file of records to learn from is named"),
        ("--label text", "--prompt, --label: no file has these columns"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(
    folder: Path, posttrain: Call, options: str, mistake: str
) -> None:
    (folder / "two.csv").write_text("text,label,category\n" + "".join(f"so {n} it is,a,b\n" for n in range(5)))
    (folder / "other.csv").write_text("message\nhow\n")
    (folder / "empty.csv").write_text("")
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    assert mistake in posttrain("init", "work", *options.split()).mistake
    assert not (folder / "work").exists()


def test_the_example_is_a_workspace_of_its_own(folder: Path, posttrain: Call) -> None:
    # As pip does where it installs a wheel.
    compileall.compile_dir(Path(posttrain_package.__file__).parent / "cli" / "example", quiet=1)
    assert posttrain("init", "shop", "--example").code == 0
    assert {path.name for path in (folder / "shop").iterdir()} >= {"inputs.csv", "test.csv", "labels.txt", "fill.py"}
    assert posttrain("config", "check", "-w", "shop").code == 0
    before = {path: path.read_bytes() for path in (folder / "shop").iterdir() if path.is_file()}
    mistake = posttrain("init", "shop", "--example").mistake
    assert mistake == "shop/posttrain.yaml: a workspace is here already; posttrain run -w shop"
    (folder / "mine").mkdir()
    (folder / "mine" / "test.csv").write_text("text,label\n", "utf-8")
    mistake = posttrain("init", "mine", "--example").mistake
    assert mistake == "mine/test.csv: another file is here already; name a new folder"
    assert [path.name for path in (folder / "mine").iterdir()] == ["test.csv"]
    assert {path: path.read_bytes() for path in before} == before
    mistake = posttrain("init", "other", "--example", "--test", "test.csv").mistake
    assert mistake == "--example: the example brings its own files; leave out the other options"
    assert not (folder / "other").exists()
