"""Each kind of answers refuses what does not fit, stores equal answers as equal values, and becomes records."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.label.answer_kinds import KINDS, Question, answer_kind
from posttrain.store.errors import UserError

PROMPT = [{"role": "user", "content": "Where is my card?"}]
ITEM = Question({"prompt": PROMPT, "candidates": ["first", "second", "third"], "answer": "old"}, ["card", "cash"])
PAIR = Question({"prompt": PROMPT, "candidates": ["first", "second"]}, None)

ASSISTANT, USER = {"role": "assistant", "content": "On its way."}, {"role": "user", "content": "When?"}


@pytest.mark.parametrize(
    ("kind", "answer", "stored"),
    [
        ("choice", "card", "card"),
        ("choices", ["cash", "card"], ["card", "cash"]),
        ("choices", [], []),
        ("text", " as it is\n", " as it is\n"),
        ("spans", [{"start": 9, "end": 11, "label": "cash"}, {"label": "card", "end": 5, "start": 0}], None),
        ("rewrite", "new", "new"),
        ("rating", 5, 5),
        ("preference", 0, 0),
        ("preference", "tie", "tie"),
        ("ranking", [2, 0, 1], [2, 0, 1]),
        ("conversation", [ASSISTANT, USER, ASSISTANT], [ASSISTANT, USER, ASSISTANT]),
    ],
)
def test_answers_that_fit(kind: str, answer: Any, stored: Any) -> None:
    checked = KINDS[kind].check(answer, ITEM)
    assert checked == (stored if stored is not None else answer[::-1])
    assert KINDS[kind].check(checked, ITEM) == checked
    assert isinstance(KINDS[kind].key(checked), str)


@pytest.mark.parametrize(
    ("kind", "answer", "message"),
    [
        ("choice", "crad", "label `crad` is not in the label set; did you mean `card`"),
        ("choice", 3, "3 is not a label"),
        ("choices", "card", "the answer is a list of labels"),
        ("choices", ["card", "card"], "a label is given twice"),
        ("text", "  ", "an answer is a text that is not empty"),
        ("text", "a\x00", "a character that is not text"),
        ("text", "\ud800", "a character that is not text"),
        ("text", "x" * 100_001, "has 100,001 characters"),
        ("spans", [{"start": 0, "end": 18, "label": "card"}], "not within the 17 characters"),
        ("spans", [{"start": 3, "end": 3, "label": "card"}], "is not within"),
        ("spans", [{"start": 0, "end": 3}], "a span has the keys end, label, start"),
        ("spans", [{"start": True, "end": 3, "label": "card"}], "start is a whole number"),
        ("spans", [{"start": 0, "end": 3, "label": "card"}] * 2, "a span is given twice"),
        ("rating", 6, "6 is not a rating"),
        ("rating", True, "a rating is a whole number"),
        ("preference", 2, "2 is not a preference"),
        ("preference", 0.0, "a preference is a whole number"),
        ("ranking", [0, 1], "names each candidate once; order 0 to 2"),
        ("ranking", [0, 1, 1], "names each candidate once"),
        ("conversation", [ASSISTANT, USER], "the last turn must be the assistant's"),
        ("conversation", [], "the last turn must be the assistant's"),
        ("conversation", [{"role": "boss", "content": "x"}], "`boss` is not a role"),
        ("conversation", [{"role": "user"}], "a turn has the keys content, role"),
    ],
)
def test_answers_that_do_not_fit(kind: str, answer: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        KINDS[kind].check(answer, ITEM)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    answer=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["start", "end", "role"]), inner),
        max_leaves=6,
    ),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_any_json_is_stored_or_refused_in_a_line(answer: Any, kind: str) -> None:
    try:
        checked = KINDS[kind].check(answer, ITEM)
    except UserError:
        return
    KINDS[kind].records(checked, ITEM)


@pytest.mark.parametrize(
    ("kind", "answer", "records"),
    [
        ("choice", "card", [{"completion": "card"}]),
        ("choices", ["card", "cash"], [{"completion": "card; cash"}]),
        ("choices", [], [{"completion": "none"}]),
        ("text", "hello", [{"completion": "hello"}]),
        ("rewrite", "new", [{"completion": "new", "rejected": "old"}]),
        ("rewrite", "old", [{"completion": "old"}]),
        ("rating", 5, [{"completion": "old", "label": True, "rating": 5}]),
        ("rating", 1, [{"completion": "old", "label": False, "rating": 1}]),
        ("rating", 3, []),
        ("preference", 1, [{"completion": "second", "rejected": "first"}]),
        ("preference", "tie", []),
        (
            "ranking",
            [2, 0, 1],
            [
                {"completion": "third", "rejected": "first"},
                {"completion": "third", "rejected": "second"},
                {"completion": "first", "rejected": "second"},
            ],
        ),
    ],
)
def test_answers_become_records(kind: str, answer: Any, records: list[dict[str, Any]]) -> None:
    assert KINDS[kind].records(answer, ITEM) == [{"prompt": PROMPT, **record} for record in records]


def test_a_mark_for_a_text_is_the_records_answer() -> None:
    """Without an answer of a model, of which it would say whether it is desirable."""
    for mark in (1, 3, 5):
        assert KINDS["rating"].records(mark, Question({"text": "x"}, None)) == [{"text": "x", "completion": str(mark)}]


def test_spans_become_the_marked_words() -> None:
    answer = [{"start": 12, "end": 16, "label": "card"}]
    (record,) = KINDS["spans"].records(answer, ITEM)
    assert record == {"prompt": PROMPT, "completion": '[{"label": "card", "text": "card"}]', "spans": answer}


def test_each_answer_of_a_conversation_is_a_record() -> None:
    answer = [ASSISTANT, USER, {"role": "assistant", "content": "Monday."}]
    first, second = KINDS["conversation"].records(answer, ITEM)
    assert first == {"prompt": PROMPT, "completion": "On its way."}
    assert second == {"prompt": [*PROMPT, ASSISTANT, USER], "completion": "Monday."}


def test_items_without_candidates_and_unknown_kinds() -> None:
    with pytest.raises(UserError, match="no candidates to compare"):
        KINDS["ranking"].check([0, 1], Question({"text": "?"}, None))
    with pytest.raises(UserError, match="`stars` is not a kind of answers; one of choice, choices"):
        answer_kind("stars")
    assert KINDS["preference"].records(0, PAIR)[0]["rejected"] == "second"


@pytest.mark.parametrize(
    ("kind", "answer"),
    [("choice", "card"), ("choices", ["card"]), ("choices", []), ("spans", [{"start": 0, "end": 5, "label": "card"}])],
)
def test_other_answers_are_wrong(kind: str, answer: Any) -> None:
    others = [KINDS[kind].key(other) for other in KINDS[kind].others(answer, ["card", "cash"])]
    assert others
    assert KINDS[kind].key(answer) not in others
