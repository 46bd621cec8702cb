"""``posttrain data`` as a user types it: build, name, explain, compare, export and delete versions."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.cli.main import main

pytestmark = pytest.mark.slow

Call = Callable[..., Any]

CONFIG: dict[str, Any] = {
    "model": "tiny",
    "data": {
        "columns": {"prompt": "text", "completion": "label"},
        "steps": ["normalise", "exact", {"minhash": {"threshold": 0.7}}, "decontaminate"],
        "splits": {"test": 0.3},
    },
}
SUBJECTS = ("parcel", "invoice", "card", "transfer", "refund", "account", "password", "statement", "limit", "fee")
INLINE = ("--engine", "inline")  # processes would take longer to start than these few records take
VERBS = ("lost", "stolen", "declined", "missing", "unexpected")


def messages(first: int, last: int) -> list[dict[str, str]]:
    """Different messages; their numbers make all of them dissimilar."""
    rows = []
    for number in range(first, last):
        subject, verb = SUBJECTS[number % 10], VERBS[number // 10 % 5]
        word = "".join(chr(97 + int(digit) * 2) for digit in f"{number * 7919:09d}")
        rows.append({"text": f"{word} {subject} {verb} {word[::-1]}", "label": subject})
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_workspace(folder: Path) -> Path:
    """A workspace with a config and two files of records."""
    (folder / "posttrain.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    rows = messages(0, 60)
    rows += [{**rows[0], "text": f" {rows[0]['text']}\n"}, {**rows[1], "text": rows[1]["text"] + " !"}]
    write(folder / "first.jsonl", rows)
    write(folder / "more.jsonl", messages(60, 80))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_workspace(tmp_path)


@pytest.fixture(scope="module")
def shared_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with support@v1.0.0 and support@v1.1.0; read-only."""
    folder = write_workspace(tmp_path_factory.mktemp("built"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        for file in ("first", "more"):
            with pytest.raises(SystemExit, match="0"):
                main(["data", "add", str(folder / f"{file}.jsonl"), *INLINE, "--name", "support", "-w", str(folder)])
    return folder


@pytest.fixture
def workspace(shared_build: Path, tmp_path: Path) -> Path:
    """A copy of `shared_build`."""
    return shutil.copytree(shared_build, tmp_path / "workspace", symlinks=True)


def test_add_prints_the_counts_of_each_step_and_the_version(root: Path, posttrain: Call) -> None:
    output = posttrain("data", "add", root / "first.jsonl", "--name", "support", "--note", "the first", "-w", root).out
    for line in (["read", "in", "62"], ["exact", "exact", "duplicate", "1"], ["minhash", "near", "duplicate", "1"]):
        assert any(line == result.split() for result in output.splitlines()), line
    assert "support@v1.0.0  dataset-" in output
    result = posttrain("data", "add", root / "more.jsonl", *INLINE, "--name", "support", "-w", root, "--json").json
    assert result["version"] == "support@v1.1.0"
    assert [source["name"] for source in result["sources"]] == ["first.jsonl", "more.jsonl"]
    assert sum(result["counts"]["splits"].values()) == result["counts"]["records"]


def test_versions_are_listed_with_their_history(workspace: Path, posttrain: Call) -> None:
    assert posttrain("data", "tag", "support@v1.0.0", "production", "-w", workspace).out == (
        "support@production is support@v1.0.0\n"
    )
    versions = posttrain("data", "list", "-w", workspace, "--json").json
    assert [(row["version"], row["tags"]) for row in versions] == [
        ("support@v1.0.0", "production"),
        ("support@v1.1.0", ""),
    ]
    newest, oldest = posttrain("data", "log", "support", "-w", workspace, "--json").json
    assert newest["parent"] == oldest["id"]
    assert [source["name"] for source in newest["came"]] == ["more.jsonl"]
    assert [row["added"] for row in versions] == [oldest["added"], newest["added"]] == [{"files": 60}, {"files": 20}]
    log = posttrain("data", "log", "support", "-w", workspace).out
    assert "  added: 20 from files\n  + 20 read from more.jsonl\n" in log
    diff = ("data", "diff", "support@v1.0.0", "support@v1.1.0", "-w", workspace)
    assert posttrain(*diff).out.startswith("20 added, 0 removed, 0 changed\nadded: 20 from files\n")
    assert posttrain(*diff, "--json").json["kinds"] == {"came": {"files": 20}, "went": {}}
    assert "added: 20 from files" in posttrain("data", "show", "support", "-w", workspace).out
    production = posttrain("data", "show", "support@production", "-w", workspace, "--json").json
    assert production["counts"]["records"] == oldest["records"]


def test_rejections_are_listed_by_step_and_explained(workspace: Path, posttrain: Call) -> None:
    arguments = ("data", "show", "support", "--rejected", "--step", "minhash", "-w", workspace)
    (rejected,) = posttrain(*arguments, "--json").json["rejected"]
    assert (rejected["line"], rejected["reason"]) == (62, "near duplicate")
    assert 0.7 <= rejected["score"] < 1
    assert rejected["kept"] == rejected["cluster"] != rejected["id"]
    assert "near duplicate" in posttrain(*arguments).out
    (history,) = posttrain("data", "why", rejected["id"], "-w", workspace, "--json").json
    assert history["version"] == "support@v1.1.0"
    assert history["split"] is None
    assert [event["step"] for event in history["events"]] == ["read", "minhash"]
    (representative,) = posttrain("data", "why", rejected["kept"], "-w", workspace, "--json").json
    assert representative["split"] in ("train", "test")
    assert "stayed in the place of 1 other record" in [event["what"] for event in representative["events"]]
    output = posttrain("data", "why", rejected["kept"][:8], "-w", workspace).out
    assert "read from first.jsonl:2" in output
    assert "no step `semantic`" in posttrain(*arguments[:5], "semantic", "-w", workspace).mistake


def test_the_history_of_a_changed_record_starts_with_its_line(root: Path, posttrain: Call) -> None:
    write(root / "raw.jsonl", [*messages(0, 20), {"text": "a\u00a0word   \r\nand more", "label": "fee"}])
    assert posttrain("data", "add", root / "raw.jsonl", "--name", "raw", "--step", "normalise", "-w", root).code == 0
    result = posttrain("data", "show", "raw", "--limit", "30", "-w", root, "--json").json["records"]
    (changed,) = [row for row in result if row["line"] == 21]
    assert changed["prompt"][0]["content"] == "a word\nand more"
    (history,) = posttrain("data", "why", changed["id"], "-w", root, "--json").json
    assert history["events"][0]["what"] == "read from raw.jsonl:21"


def test_versions_are_compared(workspace: Path, posttrain: Call) -> None:
    change = posttrain("data", "diff", "support@v1.0.0", "support@v1.1.0", "-w", workspace, "--json").json
    assert {row["source"] for row in change["came"]} == {"more.jsonl"}
    assert change["changed"] == []
    for row in change["went"]:
        assert row["step"] == "decontaminate"


def test_a_version_is_exported_and_read_back(workspace: Path, posttrain: Call) -> None:
    count = posttrain("data", "show", "support", "-w", workspace, "--json").json["counts"]["splits"]
    for name in ("out.jsonl", "out.parquet", "out.csv", "folder"):
        output = posttrain("data", "export", "support", workspace / name, "--split", "train", "-w", workspace).out
        assert output == f"wrote {count['train']} records to {workspace / name}\n"
        assert posttrain("data", "check", workspace / name).code == 0
    assert posttrain("data", "export", "support", workspace / "both", "-w", workspace).code == 0
    assert sorted(path.name for path in (workspace / "both").iterdir()) == ["dataset_dict.json", "test", "train"]
    assert posttrain("data", "check", workspace / "both" / "test").code == 0
    assert "exists already" in posttrain("data", "export", "support", workspace / "both", "-w", workspace).mistake


def test_gc_deletes_old_versions(workspace: Path, posttrain: Call) -> None:
    assert posttrain("data", "gc", "-w", workspace, "--json").json == {"versions": [], "artifacts": [], "bytes": 0}
    assert (
        posttrain(
            "data", "add", workspace / "more.jsonl", *INLINE, "--name", "support", "--fresh", "-w", workspace
        ).code
        == 0
    )
    before = posttrain("data", "show", "support", "-w", workspace, "--json").json
    output = posttrain("data", "gc", "--keep", "1", "--dry-run", "-w", workspace, "--json").json
    assert output["versions"] == ["support@v1.0.0", "support@v1.1.0"]
    assert output["bytes"] > 0
    assert len(posttrain("data", "list", "-w", workspace, "--json").json) == 3
    assert posttrain("data", "gc", "--keep", "1", "-w", workspace, "--json").json == output
    assert posttrain("data", "show", "support", "-w", workspace, "--json").json == before
    assert posttrain("data", "gc", "--keep", "1", "-w", workspace, "--json").json["artifacts"] == []
    assert posttrain("data", "add", workspace / "first.jsonl", *INLINE, "--name", "support", "-w", workspace).code == 0


def test_reports_of_one_version_and_of_a_change(workspace: Path, posttrain: Call) -> None:
    page = workspace / "report.html"
    assert posttrain("data", "report", "support", page, "--since", "support@v1.0.0", "-w", workspace).code == 0
    assert "support@v1.0.0" in page.read_text(encoding="utf-8")
    result = posttrain("data", "report", "support@v1.0.0", "-w", workspace, "--json").json
    assert result["drift"] is None
    assert result["profile"]["records"] > 0


def test_training_reads_a_version(workspace: Path, posttrain: Call) -> None:
    out = workspace / "trained"
    settings = ("--set", "train.epochs=1", "--out", out, "-w", workspace)
    assert posttrain("train", "--model", "tiny", "--data", "support@v1.0.0", *settings).code == 0
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    count = posttrain("data", "show", "support@v1.0.0", "-w", workspace, "--json").json["counts"]["splits"]["train"]
    assert summary["examples"] == count


def test_a_leaking_split_blocks_training(root: Path, posttrain: Call) -> None:
    """Without near-duplicate clusters and decontamination similar long texts fall into both splits."""
    long = "the quick brown fox jumps over the lazy dog and runs far away from here today"
    rows = [{"text": f"{row['text']} {long} {row['text'][::-1]}", "label": "fee"} for row in messages(0, 40)]
    data = {**CONFIG["data"], "steps": ["exact"], "splits": {"test": 0.5, "near_duplicates": None}}
    (root / "posttrain.yaml").write_text(yaml.safe_dump({**CONFIG, "data": data}), encoding="utf-8")
    write(root / "leaking.jsonl", [rows[number] for number in range(8)])
    assert posttrain("data", "add", root / "leaking.jsonl", "--name", "leaking", "-w", root).code == 0
    message = posttrain("train", "--model", "tiny", "--data", "leaking", "--out", root / "out", "-w", root).mistake
    assert "of train overlap with test" in message
    assert not (root / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a", "label": "x"}\n{"text": "b"\n', "bad.jsonl:2: broken JSON"),
        ('{"text": "a", "label": "x", "id": 1}\n{"text": "b", "label": "x", "id": 1}\n', "bad.jsonl:2: the id `1`"),
        ("", "bad.jsonl: the file holds no records"),
        ('{"text": "a", "label": NaN}\n', "bad.jsonl:1:"),
    ],
)
def test_a_bad_file_leaves_the_workspace_unchanged(root: Path, posttrain: Call, content: str, message: str) -> None:
    (root / "bad.jsonl").write_text(content, encoding="utf-8")
    before = sorted(root.rglob("*"))
    assert message in posttrain("data", "add", root / "bad.jsonl", "--name", "bad", "-w", root).mistake
    assert sorted(root.rglob("*")) == before


def test_a_suite_that_shares_all_its_records_is_refused(root: Path, posttrain: Call) -> None:
    suite = write(root / "suite.jsonl", messages(0, 60)[20:24])
    data = {**CONFIG["data"], "splits": None}
    config = {**CONFIG, "data": data, "evaluate": {"suites": {"copied": {"data": suite.name, "scorer": "exact_match"}}}}
    (root / "posttrain.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    message = posttrain("data", "add", root / "first.jsonl", "--name", "support", "-w", root).mistake
    assert message.startswith("suite.jsonl: all 4 records of the suite stand in the training files")
    assert not (root / ".posttrain").exists()


def test_an_empty_split_is_refused(root: Path, posttrain: Call) -> None:
    write(root / "one.jsonl", messages(0, 1))
    assert "is empty" in posttrain("data", "add", root / "one.jsonl", "--name", "one", "-w", root).mistake
    assert not (root / ".posttrain").exists()


def test_names_and_versions_are_checked(workspace: Path, posttrain: Call) -> None:
    add = ("data", "add", workspace / "first.jsonl", "-w", workspace, "--name")
    assert "`pool` is the loop's own" in posttrain(*add, "pool").mistake
    assert "`a b` is not a name" in posttrain(*add, "a b").mistake
    assert "`2.x` is not a semantic version" in posttrain(*add, "support", "--version", "2.x").mistake
    assert "there is no step `minhsh`; did you mean `minhash`?" in posttrain(*add, "x", "--step", "minhsh").mistake
    assert "is not a tag" in posttrain("data", "tag", "support", "v2", "-w", workspace).mistake
    assert "there is no dataset" in posttrain("data", "log", "nothing", "-w", workspace).mistake


def test_datasets_need_no_config(tmp_path: Path, posttrain: Call) -> None:
    write(tmp_path / "plain.jsonl", [{"text": "one"}, {"text": "two"}, {"text": "one"}])
    file = tmp_path / "plain.jsonl"
    assert posttrain("data", "add", file, "--name", "plain", "--step", "exact", "-w", tmp_path).code == 0
    assert posttrain("data", "show", "plain", "-w", tmp_path, "--json").json["counts"]["records"] == 2


def test_gc_deletes_the_parent_of_a_version(workspace: Path, posttrain: Call) -> None:
    before = posttrain("data", "show", "support", "-w", workspace, "--json").json
    assert posttrain("data", "gc", "--keep", "1", "-w", workspace, "--json").json["versions"] == ["support@v1.0.0"]
    (entry,) = posttrain("data", "log", "support", "-w", workspace, "--json").json
    assert (entry["version"], entry["parent"]) == ("support@v1.1.0", None)
    after = posttrain("data", "show", "support", "-w", workspace, "--json").json
    # Without its parent, a version's increment is all of it.
    assert (before.pop("added"), after.pop("added")) == ({"files": 20}, {"files": 80})
    assert after == before


def test_a_refused_build_leaves_no_scratch_files(workspace: Path, posttrain: Call) -> None:
    write(workspace / "one.jsonl", messages(0, 1))
    assert "is empty" in posttrain("data", "add", workspace / "one.jsonl", "--name", "one", "-w", workspace).mistake
    assert list((workspace / ".posttrain" / "scratch").iterdir()) == []


def test_gc_deletes_the_scratch_files_of_a_failed_build(
    root: Path, posttrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr("posttrain.data.versions.build_version.write_version", defect)
        assert posttrain("data", "add", root / "first.jsonl", "--name", "first", "-w", root, *INLINE).code == 1
    assert posttrain("data", "gc", "-w", root).code == 0
    assert list((root / ".posttrain" / "scratch").iterdir()) == []


def test_the_history_of_an_augmented_record_has_its_origin(root: Path, posttrain: Call) -> None:
    data = {**CONFIG["data"], "steps": ["exact", {"augment": {"methods": [{"method": "typos"}]}}]}
    (root / "posttrain.yaml").write_text(yaml.safe_dump({**CONFIG, "data": data}), encoding="utf-8")
    outcome = posttrain("data", "add", root / "first.jsonl", "--name", "more", "-w", root)
    assert outcome.code == 0, outcome

    def rows(split: str) -> list[dict[str, Any]]:
        arguments = ("data", "show", "more", "--split", split, "--limit", "500", "-w", root, "--json")
        return [{**row, "meta": json.loads(row["meta"])} for row in posttrain(*arguments).json["records"]]

    assert not any("augmented" in row["meta"] for row in rows("test"))
    variant = next(row for row in rows("train") if "augmented" in row["meta"])
    (history,) = posttrain("data", "why", variant["id"], "-w", root, "--json").json
    (event,) = [event for event in history["events"] if event["step"] == "augment"]
    assert event["before"] == variant["meta"]["augmented"]["of"]


def test_a_synthesis_without_usable_records_writes_no_file(root: Path, tiny_model: Path, posttrain: Call) -> None:
    seeds = write(root / "seeds.jsonl", [{"prompt": row["text"], "completion": row["label"]} for row in messages(0, 3)])
    settings = ("--method", "paraphrases", "--records", "1", "--model", tiny_model, "-w", root / "nowhere")
    outcome = posttrain("data", "synthesize", seeds, root / "new.jsonl", *settings)
    assert outcome.code == 1
    assert "wrote no record that could be used (asked 4, written 4, synthesize: " in outcome.err
    assert not (root / "new.jsonl").exists()
    assert list((root / "new.replies" / "replies").iterdir())
    rejected = [json.loads(line) for line in (root / "new.rejected.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rejected) == 4
    assert all(row["step"] == "synthesize" and row["reason"] and row["meta"]["synthetic"]["seeds"] for row in rejected)
    assert f"see {root / 'new.rejected.jsonl'}" in outcome.err.replace("\n", "")


def test_a_column_that_is_missing_everywhere_is_reported_once(tmp_path: Path, posttrain: Call) -> None:
    rows = [{"prompt": f"question {number}", "answer": "yes"} for number in range(40)]
    rows[7]["prompt"] = ""
    write(tmp_path / "a.jsonl", rows)
    config = {**CONFIG, "data": {"columns": {"prompt": "prompt", "group": "user"}}}
    (tmp_path / "posttrain.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    arguments = ("data", "check", tmp_path / "a.jsonl", "-w", tmp_path)
    output = posttrain(*arguments).out
    line = "a.jsonl:1: there is no column `user`; the columns are prompt, answer (the same in 39 more records)"
    assert line in output.splitlines()[0]
    assert output.splitlines()[1:] == ["missing column: 40; --all lists every record"]
    assert len(posttrain(*arguments, "--json").json["problems"]) == 40, "the JSON lists every line"


def test_each_kind_of_problem_is_one_line_with_a_count(tmp_path: Path, posttrain: Call) -> None:
    rows = [{"prompt": "", "completion": "yes"}] * 3 + [{"prompt": str(number)} for number in range(3)]
    file = write(tmp_path / "a.jsonl", rows)
    with file.open("a", encoding="utf-8") as more:
        more.write("{\n[1]\n{}\n{\n")
    lines = posttrain("data", "check", file, "-w", tmp_path).out.splitlines()
    assert len(lines) == 5, lines
    assert lines[0] == f"{file}:1: the prompt is empty (the same in 2 more records)"
    assert lines[-1].endswith("; --all lists every record")
    every = posttrain("data", "check", file, "-w", tmp_path, "--all").out.splitlines()
    assert sum("the prompt is empty" in line for line in every) == 3
    assert len(every) == 8
    # A command that stops at the first one counts the others, too.
    message = posttrain("data", "add", file, "--name", "x", *INLINE, "-w", tmp_path).mistake
    assert "a.jsonl:1: the prompt is empty (the same in 2 more records; `posttrain data check a.jsonl --all`" in message


def test_a_name_that_is_neither_a_file_nor_a_version_is_refused(root: Path, posttrain: Call) -> None:
    assert posttrain("data", "add", root / "first.jsonl", *INLINE, "--name", "support", "-w", root).code == 0
    for name, exists in (("support", True), ("support@v1", True), ("suport", False), ("support@v9", False)):
        config = {**CONFIG, "data": {**CONFIG["data"], "labelled": name, "test": "support"}}
        (root / "posttrain.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        if exists:
            assert posttrain("config", "check", "-w", root).code == 0
        else:
            message = posttrain("config", "check", "-w", root).mistake
            assert message.startswith(f"{name}: there is no such file, and no such dataset version; check the path")
            assert posttrain("run", "-w", root).mistake == message
    # The dataset's own test split is not a suite, so that its next version can be built.
    assert posttrain("data", "add", root / "more.jsonl", *INLINE, "--name", "support", "-w", root).code == 0
