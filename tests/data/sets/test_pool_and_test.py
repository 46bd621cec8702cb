"""From files to pool, test and labelled: every planted fault found, every record accounted for."""

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from posttrain.data.config import DataConfig
from posttrain.data.reading.reader import read
from posttrain.data.sets import pool_and_test
from posttrain.data.sets.pool_and_test import LoopData, build_pool_and_test, input_digests
from posttrain.store.errors import UserError

COLUMNS = {"prompt": "text", "completion": "category", "group": "user"}
LABELS = ["card", "cash"]


def write(path: Path, rows: list[tuple[str, str, str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "category", "user"), *rows])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(
        tmp_path / "pool.csv",
        [
            ("how do I order a second card", "card", ""),  # 2
            ("how do I order a second card", "cash", ""),  # 3 the same once its answer is hidden
            ("how do I order a second  card", "", ""),  # 4
            ("how do I order a second card!", "", ""),  # 5 near
            ("the machine kept all of my money", "", ""),  # 6 equals test 2
            ("the machine kept all of my money.", "", ""),  # 7 like test 2
            ("good morning to all of you", "", "anna"),  # 8 a test group
            ("my transfer has not arrived yet", "", ""),  # 9 labelled already
            ("can I have two accounts here", "", ""),  # 10
        ],
    )
    write(
        tmp_path / "labelled.csv",
        [
            ("my transfer has not arrived yet", "cash", ""),  # 2
            ("is there a fee for this", "cash", ""),  # 3 contradicts 4
            ("is there a fee for this", "card", ""),  # 4
            ("who stole my card", "", ""),  # 5 no answer
            ("the machine kept all of my money", "cash", ""),  # 6 equals test 2
        ],
    )
    write(
        tmp_path / "test.csv",
        [
            ("the machine kept all of my money", "cash", ""),  # 2
            ("the card is blocked, what now", "card", "anna"),  # 3
            ("the card is blocked, what now", "card", "anna"),  # 4 duplicate
        ],
    )
    return tmp_path


EXACT_STEPS = ["exact", "conflicts", {"decontaminate": {"ngram": None, "threshold": None}}]


def config(**values: Any) -> DataConfig:
    files = {"pool": "pool.csv", "labelled": "labelled.csv", "test": "test.csv", "columns": COLUMNS}
    return DataConfig.read({**files, **values}, "posttrain.yaml")


def check_funnel(data: LoopData) -> None:
    """Every set's funnel starts with what came in, ends with what is kept, and adds up."""
    tables = {"pool": data.pool, "labelled": data.labelled, "test": data.test}
    for name, table in tables.items():
        entries = [entry for entry in data.funnel if entry["set"] == name]
        assert (entries[0]["reason"], entries[-1]["reason"]) == ("in", "kept")
        assert entries[-1]["count"] == table.num_rows
        assert entries[0]["count"] == sum(entry["count"] for entry in entries[1:])
        counts = {(e["step"], e["reason"]): e["count"] for e in entries[1:-1] if e["step"] != "split"}
        rejected = data.rejected[name]
        assert counts == Counter(zip(rejected["step"].to_pylist(), rejected["reason"].to_pylist(), strict=True))


def test_every_planted_fault_is_found(folder: Path) -> None:
    data = build_pool_and_test(config(), folder, LABELS)
    check_funnel(data)
    assert data.pool["line"].to_pylist() == [2, 10]
    assert data.pool["completion"].null_count == 2
    assert data.labelled["line"].to_pylist() == [2]
    assert data.test["line"].to_pylist() == [2, 3]
    assert set(data.pool["source"].to_pylist()) == {"pool.csv"}
    result = {
        name: sorted((row["line"], row["reason"], row["detail"]) for row in table.to_pylist())
        for name, table in data.rejected.items()
    }
    labels = "`cash` at labelled.csv:3; `card` at labelled.csv:4"
    assert result == {
        "pool": [
            (3, "exact duplicate", "the same as pool.csv:2"),
            (4, "exact duplicate", "the same as pool.csv:2"),
            (5, "near duplicate", "similarity 0.96 to pool.csv:2"),
            (6, "equals a test input", "the same input as test.csv:2"),
            (7, "near duplicate", "similarity 0.97 to pool.csv:6"),
            (8, "group of a test record", "its group `anna` is also that of test.csv:3"),
            (9, "already labelled", "the same input as labelled.csv:2"),
        ],
        "labelled": [
            (3, "conflicting labels", labels),
            (4, "conflicting labels", labels),
            (5, "no answer", "the answer is empty"),
            (6, "equals a test input", "the same input as test.csv:2"),
        ],
        "test": [(4, "exact duplicate", "the same as test.csv:3")],
    }


def test_open_ended_answers_may_differ(folder: Path) -> None:
    data = build_pool_and_test(config(), folder)
    assert data.labelled["line"].to_pylist() == [2, 3, 4]


def test_similarity_steps_can_be_omitted(folder: Path) -> None:
    data = build_pool_and_test(config(steps=EXACT_STEPS), folder, LABELS)
    assert data.pool["line"].to_pylist() == [2, 5, 7, 10]


def test_a_share_of_the_labelled_records_becomes_the_test_set(tmp_path: Path) -> None:
    rows = [(f"a wholly different question {n} {n * n}", LABELS[n % 2], f"user {n % 50}") for n in range(200)]
    write(tmp_path / "labelled.csv", rows)
    data = build_pool_and_test(config(pool=[], test=0.3, steps=EXACT_STEPS), tmp_path, LABELS)
    check_funnel(data)
    assert data.test.num_rows + data.labelled.num_rows == 200
    assert 20 < data.test.num_rows < 110
    assert not set(data.test["group"].to_pylist()) & set(data.labelled["group"].to_pylist())
    other_seed = build_pool_and_test(config(pool=[], test=0.3, split_seed=1), tmp_path, LABELS)
    assert other_seed.test["line"].to_pylist() != data.test["line"].to_pylist()


@pytest.mark.parametrize("name", ["pool", "labelled"])
def test_variants_of_test_records_are_rejected(folder: Path, name: str) -> None:
    """Steps that compare texts see none of them: a paraphrase has other words."""
    origin = build_pool_and_test(config(), folder, LABELS).test["id"][0].as_py()
    rows = [
        {
            "text": "an ATM swallowed what I had",
            "category": "cash",
            "augmented": {"method": "paraphrase", "of": origin},
        },
        {"text": "something else", "category": "cash"},
    ]
    (folder / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "text", "completion": "category"}
    data = build_pool_and_test(config(**{name: ["more.jsonl"]}, columns=columns), folder, LABELS)
    rejected = data.rejected[name].filter(pc.equal(data.rejected[name]["source"], "more.jsonl"))
    assert list(zip(rejected["line"].to_pylist(), rejected["reason"].to_pylist(), strict=True)) == [
        (1, "made of a test record")
    ]


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_batch_boundaries_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    expected = build_pool_and_test(config(), folder, LABELS)
    monkeypatch.setattr(pool_and_test, "read", lambda *args, **kwargs: read(*args, **kwargs, batch=batch))
    result = build_pool_and_test(config(), folder, LABELS)
    assert result.pool.equals(expected.pool)
    assert result.test.equals(expected.test)
    assert result.labelled.equals(expected.labelled)
    assert result.funnel == expected.funnel
    assert all(result.rejected[name].equals(table) for name, table in expected.rejected.items())


@pytest.mark.parametrize("name", ["labelled", "test"])
def test_an_unknown_label_raises(folder: Path, name: str) -> None:
    write(folder / f"{name}.csv", [("one", "card", ""), ("two", "crad", "")])
    with pytest.raises(UserError, match=rf"^{name}\.csv:3: label `crad` .* did you mean `card`\?$"):
        build_pool_and_test(config(), folder, LABELS)


def test_files_without_any_answer_raise(folder: Path) -> None:
    (folder / "labelled.csv").write_text("text,category,user\none,,\n")
    with pytest.raises(
        UserError,
        match=r"^labelled\.csv: no record has an answer; name the column of the completion in `data\.columns`",
    ):
        build_pool_and_test(config(), folder, LABELS)


def test_a_config_without_files_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.pool: no file of records is named"):
        build_pool_and_test(DataConfig(), tmp_path)


def test_digests_follow_the_content(folder: Path) -> None:
    before = input_digests(config(), folder)
    assert list(before) == ["pool.csv", "labelled.csv", "test.csv"]
    (folder / "test.csv").touch()
    assert input_digests(config(), folder) == before
    with (folder / "test.csv").open("a") as file:
        file.write("more,card,\n")
    after = input_digests(config(), folder)
    assert {name for name in before if before[name] != after[name]} == {"test.csv"}
    (folder / "set").mkdir()
    (folder / "set" / "a.arrow").write_bytes(b"a")
    folder_digest = input_digests(config(pool="set"), folder)["set"]
    (folder / "set" / "a.arrow").rename(folder / "set" / "b.arrow")
    assert input_digests(config(pool="set"), folder)["set"] != folder_digest
    with pytest.raises(UserError, match=r"^no\.csv: there is no such file"):
        input_digests(config(pool="no.csv"), folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"test": 1.5}, "`test`: a share of the labelled records must lie between 0 and 1"),
        ({"test": 0.0}, "`test`: a share"),
        ({"columns": {"promt": "text"}}, "`columns`: `promt` is none of prompt, completion"),
        ({"steps": ["minhsh"]}, "`steps`: there is no step `minhsh`; did you mean `minhash`?"),
        ({"steps": [{"minhash": {"treshold": 0.5}}]}, "minhash: unknown key `treshold`; did you mean `threshold`?"),
        ({"steps": ["decontaminate", "exact"]}, "`exact` cannot follow `decontaminate`"),
        ({"step": ["exact"]}, "unknown key `step`; did you mean `steps`?"),
    ],
)
def test_invalid_config_raises(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        config(**values)
    assert message in str(error.value)


def test_a_pool_holds_one_record_of_an_id(tmp_path: Path) -> None:
    """Labels are kept by id, and ids ignore the indentation in which programs differ."""
    programs = ["for x in y:\n  a\n  b", "for x in y:\n  a\nb", "print(1)"]
    (tmp_path / "pool.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in programs))
    config = DataConfig.read({"pool": "pool.jsonl", "steps": ["exact"]}, "data")
    data = build_pool_and_test(config, tmp_path, None)
    assert data.pool["line"].to_pylist() == [1, 3]
    assert data.rejected["pool"].select(["line", "reason", "detail"]).to_pylist() == [
        {"line": 2, "reason": "same id", "detail": "the same as pool.jsonl:1 but for whitespace"}
    ]
