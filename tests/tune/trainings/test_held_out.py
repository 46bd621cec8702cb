"""Records that are held out of a training set: what is alike stays together, and nothing of them is trained on."""

import json
import random

import numpy as np
import pyarrow as pa

from posttrain.data.versions.leaks import find_leaks
from posttrain.testing.steps import table_of
from posttrain.tune.trainings.held_out import hold_out

WORDS = [
    *("amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "haven"),
    *("inlet", "jetty", "knoll", "ledge", "marsh", "north", "orbit", "plaza", "quarry"),
]


def message(seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=9))


def split(records: pa.Table, share: float) -> tuple[set[str], set[str]]:
    return tuple(set(records.filter(pa.array(rows))["id"].to_pylist()) for rows in hold_out(records, share))  # type: ignore


def plain(count: int) -> pa.Table:
    return table_of(*({"prompt": message(n), "completion": "a"} for n in range(count)))


def test_a_share_of_the_records_in_any_order() -> None:
    records = plain(40)
    training, held_out = split(records, 0.25)
    assert (len(training), len(held_out)) == (30, 10)
    assert training.isdisjoint(held_out)
    assert split(records.take(list(range(40))[::-1]), 0.25) == (training, held_out)
    # As the set grows, what was held out stays so, but for what the share's edge decides.
    assert len(split(plain(50), 0.25)[1] & held_out) >= 8


def test_what_is_alike_stays_together() -> None:
    rows = []
    for n in range(30):
        rows += [{"prompt": f"{message(n)} {end}", "completion": "a"} for end in ("!", "?")]
    rows += [{"prompt": message(100 + n), "completion": "a", "group": f"user {n % 5}"} for n in range(20)]
    records = table_of(*rows)
    training, held_out = (records.filter(pa.array(rows)) for rows in hold_out(records, 0.3))
    assert (training.num_rows, held_out.num_rows) == (56, 24)
    assert find_leaks({"train": training, "validation": held_out}) == []
    groups = [set(table["group"].drop_null().to_pylist()) for table in (training, held_out)]
    assert groups[0] | groups[1] == {f"user {n}" for n in range(5)}
    assert groups[0].isdisjoint(groups[1])


def test_shared_runs_of_words_are_not_trained_on() -> None:
    long = " ".join(random.Random(1).choices(WORDS, k=13))
    rows = [{"prompt": f"{message(n)} {long} {message(n + 50)} {message(n + 70)}", "completion": "a"} for n in range(8)]
    records = table_of(*rows, *plain(20).select(["prompt", "completion"]).to_pylist())
    training, held_out = (records.filter(pa.array(rows)) for rows in hold_out(records, 0.3))
    assert find_leaks({"train": training, "validation": held_out}) == []
    assert training.num_rows + held_out.num_rows < records.num_rows


def test_only_answers_of_people_are_measured_on() -> None:
    records = plain(40)
    originals = records["id"].to_pylist()
    metas = [
        *({"pseudo": {"weight": 0.5}} for _ in range(10)),
        *({"augmented": {"of": originals[20 + n]}} for n in range(10)),
        *({} for _ in range(20)),
    ]
    column = pa.array([json.dumps(meta) for meta in metas])
    records = records.set_column(records.schema.get_field_index("meta"), "meta", column)
    training, held_out = hold_out(records, 0.25)
    assert held_out.sum() == 10
    assert not held_out[:20].any()
    assert training[:10].all()
    # A record goes where the one goes that it was made of, or is left out.
    assert np.array_equal(training[10:20], ~held_out[20:30])


def test_nothing_fits() -> None:
    records = table_of(*({"prompt": f"{message(1)} {n}", "completion": "a"} for n in range(6)))
    training, held_out = hold_out(records, 0.5)
    assert training.all()
    assert not held_out.any()
