"""The one text of answers with several labels or spans, and what such texts are read as."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.models.answer_form import ChoicesForm, SpansForm
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError

CHOICES = ChoicesForm(("card", "cash", "late fee"))
SPANS = SpansForm(("city", "name"))
TEXT = "Dana met Dana Kim in Lisbon 🎉"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("cash; card", "card; cash"),
        ("cash;card;", "card; cash"),
        ("late  fee\ncard", "card; late fee"),
        ("cash, card", "card; cash"),
        ('["cash", "card", "cash"]', "card; cash"),
        ("card", "card"),
        (" None ", "none"),
        ("[]", "none"),
    ],
)
def test_several_labels_have_one_text(answer: str, text: str) -> None:
    assert CHOICES.read(answer, "") == text
    assert CHOICES.labels_of(text) == ([] if text == "none" else text.split("; "))


def test_commas_belong_to_labels_that_hold_one() -> None:
    form = ChoicesForm(("card, lost", "cash"))
    assert form.read("cash; card, lost", "") == "card, lost; cash"


@pytest.mark.parametrize(
    ("form", "answer", "message"),
    [
        (CHOICES, "card; csah", "label `csah` is not in the label set; did you mean `cash`"),
        (CHOICES, "card; none", "label `none` is not in the label set"),
        (CHOICES, "[1]", "label `1` is not in the label set"),
        (CHOICES, " ; ", "the answer is empty; write `none` where no label applies"),
        (SPANS, "Dana", "`Dana` is not a list of spans"),
        (SPANS, '["Dana"]', '`"Dana"` is not a span with a label'),
        (SPANS, '[{"label": "nmae", "text": "Dana"}]', "label `nmae` is not in the label set; did you mean `name`"),
        (SPANS, '[{"label": "name", "text": "dana"}]', "`dana` is not in the text"),
        (SPANS, '[{"label": "name"}]', "a span of `name` has no words"),
        (SPANS, "[[0, 99, \"name\"]]", "the span from 0 to 99 is not within the 29 characters"),
        (SPANS, '[{"start": 0, "end": 3, "text": "Dana", "label": "name"}]', "from 0 to 3 is `Dan`, not `Dana`"),
        (SPANS, json.dumps([{"label": "name", "text": "Lisbon"}] * 2), "the span `Lisbon` is given twice"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_said_in_a_line(form: Any, answer: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        form.read(answer, TEXT)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_spans_have_one_text_by_words_or_positions() -> None:
    parts = [("name", "Dana"), ("name", "Dana Kim"), ("city", "Lisbon")]
    text = json.dumps([{"label": label, "text": words} for label, words in parts])
    by_position = '[[21, 27, "city"], [0, 4, "name"], {"start": 9, "end": 17, "label": "name"}]'
    assert SPANS.read(by_position, TEXT) == SPANS.read(text, TEXT) == text
    spans = SPANS.spans(SPANS.checked_parts(text, TEXT), TEXT)
    assert [TEXT[span["start"] : span["end"]] for span in spans] == ["Dana", "Dana Kim", "Lisbon"]
    # The second place of `Dana` is meant where a span before it ends the first.
    later = SPANS.checked_parts('[{"label": "city", "text": "met"}, {"label": "name", "text": "Dana"}]', TEXT)
    assert [span["start"] for span in SPANS.spans(later, TEXT)] == [5, 9]
    assert SPANS.read("[]", TEXT) == "[]"
    assert SPANS.labels_of(text) == ["name", "name", "city"]


@given(st.data())
def test_the_text_of_spans_is_read_as_itself(data: st.DataObject) -> None:
    text = data.draw(st.text("ab 🎉", min_size=1, max_size=12))
    start = st.integers(0, len(text) - 1)
    positions = data.draw(st.lists(st.tuples(start, st.integers(1, 3), st.sampled_from(SPANS.labels)), max_size=5))
    spans = {(begin, min(begin + length, len(text)), label) for begin, length, label in positions}
    ordered = sorted(spans)
    parts = [(label, text[begin:end]) for begin, end, label in ordered]
    written = SPANS.write(parts, text)
    assert sorted((part["label"], part["text"]) for part in json.loads(written)) == sorted(parts)
    # Overlapping repeats, such as `aa` in `aaa`, count as one place.
    if all(parts.count(part) <= text.count(part[1]) for part in parts):
        assert SPANS.read(written, text) == written
        again = SPANS.spans(SPANS.checked_parts(written, text), text)
        assert [text[span["start"] : span["end"]] for span in again] == [part["text"] for part in json.loads(written)]


@given(st.lists(st.sampled_from(CHOICES.labels or ()), unique=True))
def test_the_text_of_labels_is_read_as_itself(labels: list[str]) -> None:
    written = CHOICES.write([(label, "") for label in labels], "")
    assert CHOICES.read(written, "") == written
    assert set(CHOICES.labels_of(written)) == set(labels)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"kind": "choices"}, "a task of the kind `choices` needs its labels"),
        ({"kind": "spans"}, "a task of the kind `spans` needs its labels"),
        ({"kind": "choices", "labels": ["a;b", "c"]}, "label `a;b` holds the sign that separates several labels"),
        ({"kind": "choices", "labels": ["None", "c"]}, "`None` is the answer without a label"),
        ({"kind": "rating", "labels": ["good", "bad"]}, "rating `good` is not a whole number"),
        ({"kind": "rating", "labels": [1]}, "a label set needs at least two labels"),
    ],
)
def test_labels_fit_the_kind_of_the_task(task: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        TaskConfig.read(task, "task").with_labels_from(tmp_path)


def test_the_prompt_names_the_labels_unless_a_template_does(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "Hi {prompt}"}]
    for kind, words in (("choices", "Which of these labels apply: card; cash?"), ("spans", "labels: card; cash?")):
        task = TaskConfig.read({"kind": kind, "labels": ["card", "cash"]}, "task").with_labels_from(tmp_path)
        (turn,) = task.turns(prompt)
        assert turn["content"].startswith("Hi {prompt}\n\n")
        assert words in turn["content"]
        own = task.model_copy(update={"template": "Label this: {prompt}"})
        assert own.turns(prompt)[0]["content"] == "Label this: Hi {prompt}"
        assert own.key != task.key
    rating = TaskConfig.read({"kind": "rating", "labels": [0, 1, 2]}, "task").with_labels_from(tmp_path)
    assert (rating.label_set, rating.turns(prompt)) == (["0", "1", "2"], prompt)
    spans = TaskConfig.read({"kind": "spans", "labels": ["a"]}, "task").with_labels_from(tmp_path)
    assert (spans.max_new_tokens, spans.model_copy(update={"labels": ["b"]}).max_new_tokens) == (256, 256)
    assert TaskConfig(kind="spans", labels=["a"], max_new_tokens=9).with_labels_from(tmp_path).max_new_tokens == 9
    assert TaskConfig(kind="rating").with_labels_from(tmp_path).label_set == ["1", "2", "3", "4", "5"]
