from collections.abc import Callable

import pyarrow as pa
import pytest

from posttrain.data.schema import RECORD
from posttrain.models.chat import Encoded
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import micro_batches, pack
from posttrain.store.errors import UserError
from posttrain.train.examples import encode, epoch_order

Fresh = Callable[..., LanguageModel]
MakeRecords = Callable[..., pa.Table]


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 257])
@pytest.mark.parametrize("batch_size", [1, 4, 300])
def test_an_epoch_meets_every_row_once(rows: int, batch_size: int) -> None:
    for epoch in range(2):
        batches = epoch_order(rows, batch_size, seed=5, epoch=epoch)
        assert sorted(row for batch in batches for row in batch) == list(range(rows))
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert 1 <= len(batches[-1]) <= batch_size


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    orders = [epoch_order(50, 4, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert orders[0] == epoch_order(50, 4, 0, 0)
    for one in range(4):
        for other in range(one):
            assert orders[one] != orders[other]
    assert epoch_order(50, 4, 1, 0) != epoch_order(50, 4, 0, 1)


@pytest.mark.parametrize("tokens", [1, 60, 200, 10_000])
def test_micro_batches_hold_every_row_once_within_their_limit(examples: list[Encoded], tokens: int) -> None:
    units = [[examples[row]] for row in (9, 0, 4, 2, 7)]
    parts = list(micro_batches(units, tokens))
    assert [unit for part in parts for unit in part] == units
    sizes = [sum(len(sequence.ids) for unit in part for sequence in unit) for part in parts]
    assert all(size <= tokens or len(part) == 1 for size, part in zip(sizes, parts, strict=True))
    joined = [size + len(part[0][0].ids) for size, part in zip(sizes, parts[1:], strict=False)]
    assert all(size > tokens for size in joined), "no room is left"
    for part in parts:
        packed = pack(part)
        assert (packed.sequences, packed.tokens) == (len(part), sum(len(unit[0].ids) for unit in part))
        wanted = [(row, e.ids[at]) for row, (e,) in enumerate(part) for at, on in enumerate(e.supervised) if on]
        assert list(zip(packed.sequence.tolist(), packed.targets.tolist(), strict=True)) == wanted


def test_records_become_examples_in_their_order(fresh: Fresh, make_records: MakeRecords) -> None:
    lm = fresh()
    found, cut = encode(lm, make_records([("hi", "x"), (None, "plain text"), ("card", "refund")]), 1024)
    assert cut == []
    assert [found[0], found[2]] == [
        [lm.encode([{"role": "user", "content": asked}], said)] for asked, said in (("hi", "x"), ("card", "refund"))
    ]
    assert lm.tokenizer.decode(found[1][0].ids) == "plain text<|end|>"
    assert all(found[1][0].supervised)


def test_a_labelled_text_is_learned_as_it_is_asked(fresh: Fresh, make_records: MakeRecords) -> None:
    """What people answered to a plain text is the answer to a question, as in scoring and evaluation."""
    lm = fresh()
    (row,) = make_records([(None, "my card is gone")]).to_pylist()
    labelled = pa.Table.from_pylist([{**row, "completion": "card"}], schema=RECORD)
    ((found,),), _ = encode(lm, labelled, 1024)
    assert found == lm.encode([{"role": "user", "content": "my card is gone"}], "card")


def test_long_records_are_cut_at_their_beginning_and_counted(fresh: Fresh, make_records: MakeRecords) -> None:
    lm = fresh()
    rows = make_records([("short", "x"), ("long " * 30, "refund"), (None, "plain " * 30)])
    whole, none = encode(lm, rows, 1024)
    found, cut = encode(lm, rows, 60)
    assert (none, cut) == ([], [rows["id"][1].as_py(), rows["id"][2].as_py()])
    assert found[0] == whole[0]
    for (short,), (long,) in zip(found[1:], whole[1:], strict=True):
        assert (short.ids, short.supervised) == (long.ids[-60:], long.supervised[-60:])
    assert sum(found[1][0].supervised) == len("refund") + 1, "the answer is whole"


def test_an_answer_that_leaves_no_room_for_its_prompt(fresh: Fresh, make_records: MakeRecords) -> None:
    rows = make_records([("hi", "x"), ("hi", "an answer of some length")])
    with pytest.raises(
        UserError, match=f"record {2:020x}: its answer leaves no room for its prompt in 25 tokens"
    ) as caught:
        encode(fresh(), rows, 25)
    assert caught.value.where == "train.max_length"
    assert encode(fresh(), rows, 26)[1] == [f"{2:020x}"]


@pytest.mark.parametrize("row", [("hi", None), (None, None), (None, "")])
def test_a_record_without_an_answer(
    fresh: Fresh, make_records: MakeRecords, row: tuple[str | None, str | None]
) -> None:
    with pytest.raises(UserError, match=f"record {2:020x}: it has no answer"):
        encode(fresh(), make_records([("hi", "x"), row]), 1024)
