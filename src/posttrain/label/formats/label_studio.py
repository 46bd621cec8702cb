"""Label Studio's JSON of tasks: ``data``, ``annotations`` and ``predictions``, and its labelling interface."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any
from xml.sax.saxutils import quoteattr

from posttrain.label.formats.files import FileRecord, read_json_records, to_json
from posttrain.label.formats.items import (
    TEXT_KEYS,
    Format,
    PortableAnswer,
    PortableItem,
    Shape,
    Survey,
    is_dialogue,
    is_simple,
    shown_text,
    text_key,
    user_prompt,
)
from posttrain.label.formats.label_studio_results import (
    control_of,
    has_labels,
    read_answer,
    survey_regions,
    write_regions,
)
from posttrain.store.errors import UserError

_RECORD = "posttrain_id"  # in `data`, which Label Studio keeps; it gives each task an id of its own
_POSITIONS = "posttrain_positions"  # beside it: the unit of the spans that we have written
_PAIR = ("left", "right")


class LabelStudio(Format):
    """A JSON array of tasks, as *Export → JSON* and *Import* have it.

    Answers, skips, right answers and suggestions are exchanged; notes, flags and decisions stay in the queue.
    """

    name = "label-studio"

    def records(self, path: Path, name: str) -> Iterator[FileRecord]:
        return read_json_records(path, name)

    def survey(self, record: Mapping[str, Any], survey: Survey) -> None:
        for part in ("annotations", "predictions"):
            for labelled in _objects(record.get(part)):
                questions: dict[str, list[Mapping[str, Any]]] = {}
                for region in _objects(labelled.get("result")):
                    questions.setdefault(str(region.get("from_name")), []).append(region)
                for question, regions in questions.items():
                    survey_regions(question, regions, survey)

    def read(self, record: Mapping[str, Any], shape: Shape, where: str, left_out: Counter[str]) -> PortableItem:
        data = record.get("data")
        if not isinstance(data, Mapping):
            raise UserError("a task has an object `data`", where=where)
        content, ids = _read_data(data, shape, where)
        answers, expected = _read_annotations(record, shape, ids, left_out)
        identity = data.get(_RECORD, record.get("id"))
        return PortableItem(
            record=None if identity is None else str(identity),
            content=content,
            suggestion=_read_prediction(record, shape, ids, left_out),
            expected=expected,
            answers=answers,
            positions=data.get(_POSITIONS),
        )

    def write(self, file: IO[str], items: Iterable[PortableItem], shape: Shape) -> int:
        count = 0
        for item in items:
            file.write((",\n" if count else "[\n") + to_json(_task(item, shape)))
            count += 1
        file.write("\n]\n" if count else "[]\n")
        return count


def labelling_interface(shape: Shape) -> str:
    """Returns the labelling interface (XML) of a project for the tasks that are written for ``shape``."""
    name = control_of(shape.kind).name
    text, answer = '<Text name="text" value="$text"/>', '<Text name="answer" value="$answer"/>'
    tag = "Label" if shape.kind == "spans" else "Choice"
    labels = "".join(f"\n    <{tag} value={quoteattr(label)}/>" for label in shape.labels or ())
    pair = '<Text name="left" value="$left"/>\n  <Text name="right" value="$right"/>'
    body = {
        "choice": f'{text}\n  <Choices name="{name}" toName="text" choice="single-radio">{labels}\n  </Choices>',
        "choices": f'{text}\n  <Choices name="{name}" toName="text" choice="multiple">{labels}\n  </Choices>',
        "text": f'{text}\n  <TextArea name="{name}" toName="text" rows="5" maxSubmissions="1"/>',
        "spans": f'<Labels name="{name}" toName="text">{labels}\n  </Labels>\n  {text}',
        "rewrite": f'{text}\n  {answer}\n  <TextArea name="{name}" toName="answer" rows="5" maxSubmissions="1"/>',
        "rating": f'{text}\n  {answer}\n  <Rating name="{name}" toName="answer" maxRating="5"/>',
        "preference": f'{text}\n  {pair}\n  <Pairwise name="{name}" toName="left,right"/>',
        "ranking": f'{text}\n  <List name="candidates" value="$candidates"/>\n'
        f'  <Ranker name="{name}" toName="candidates"/>',
        "conversation": f'{text}\n  <Chat name="{name}" value="$dialogue" messageroles="user,assistant"/>',
    }[shape.kind]
    return f"<View>\n  {body}\n</View>\n"


def _task(item: PortableItem, shape: Shape) -> dict[str, Any]:
    annotations = []
    if item.expected is not None:
        annotations.append(_annotation("gold", item.expected, shape) | {"ground_truth": True})
    # Label Studio has no flags: a flagged item would come back as answered or skipped.
    for answer in (each for each in item.answers if each.status != "flagged"):
        annotation = _annotation(answer.annotator, answer.answer, shape)
        if (seconds := answer.details.get("seconds")) is not None:
            annotation["lead_time"] = seconds
        if (created := answer.details.get("created_at")) is not None:
            annotation["created_at"] = created
        annotations.append(annotation)
    predictions = []
    if item.suggestion is not None:
        prediction = {"result": write_regions(item.suggestion.get("answer"), shape)}
        for name, value in (("annotator", "model_version"), ("confidence", "score")):
            if item.suggestion.get(name) is not None:
                prediction[value] = item.suggestion[name]
        predictions.append(prediction)
    data = _write_data(item.content, shape) | {_RECORD: item.record}
    if item.positions is not None:
        data[_POSITIONS] = item.positions
    return {"data": data, "annotations": annotations, "predictions": predictions}


def _annotation(annotator: str, answer: Any, shape: Shape) -> dict[str, Any]:
    skipped = answer is None
    regions = [] if skipped else write_regions(answer, shape)
    by = {"email": annotator}
    return {"completed_by": by, "result": regions, "was_cancelled": skipped, "ground_truth": False}


def _read_annotations(
    record: Mapping[str, Any], shape: Shape, ids: Sequence[str], left_out: Counter[str]
) -> tuple[tuple[PortableAnswer, ...], Any]:
    """Returns a task's answers, and its right answer or None."""
    answers: dict[str, PortableAnswer] = {}
    expected = None
    for annotation in _objects(record.get("annotations")):
        skipped = annotation.get("was_cancelled") is True
        answer = None if skipped else _read_regions(annotation, shape, ids, left_out, "annotations")
        is_gold = annotation.get("ground_truth") is True and not skipped
        by = annotation.get("completed_by")
        name = by.get("email", by.get("id")) if isinstance(by, Mapping) else by
        annotator = shape.annotator if name is None else str(name)
        # Only one answer of an annotator to an item counts, and only one right answer.
        if (answer is None and not skipped) or (expected is not None if is_gold else annotator in answers):
            left_out["annotations"] += 1
        elif is_gold:
            expected = answer
        else:
            seconds, time = _number(annotation.get("lead_time")), _time(annotation.get("created_at"))
            details = {name: value for name, value in (("seconds", seconds), ("created_at", time)) if value is not None}
            answers[annotator] = PortableAnswer(annotator, answer, "skipped" if skipped else "answered", details)
    return tuple(answers.values()), expected


def _read_prediction(
    record: Mapping[str, Any], shape: Shape, ids: Sequence[str], left_out: Counter[str]
) -> dict[str, Any] | None:
    """Returns the first prediction that answers the question, as a suggestion."""
    suggestion = None
    for prediction in _objects(record.get("predictions")):
        answer = _read_regions(prediction, shape, ids, left_out, "predictions")
        if suggestion is not None or answer is None:
            left_out["predictions"] += 1
            continue
        confidence = _number(prediction.get("score"))
        suggestion = {"answer": answer, "confidence": confidence, "annotator": prediction.get("model_version")}
    return suggestion


def _read_regions(
    labelled: Mapping[str, Any], shape: Shape, ids: Sequence[str], left_out: Counter[str], part: str
) -> Any:
    """Returns the answer of an annotation or a prediction; None if it has none to the question."""
    if not isinstance(labelled.get("result"), list):
        return None
    regions = _objects(labelled["result"])
    control = control_of(shape.kind)
    types = (control.type, "taxonomy") if control.type == "choices" else (control.type,)
    name = shape.question or control.name
    own = [region for region in regions if region.get("from_name") == name and region.get("type") in types]
    if regions and not own and part == "predictions":
        # A model that answers another question says nothing of this one. A person has seen them all.
        return None
    # Somebody has marked words and given them no label.
    labelled_regions = own if shape.kind != "spans" else [region for region in own if has_labels(region)]
    left_out[f"{part}.result without a label"] += len(own) - len(labelled_regions)
    if own and not labelled_regions:
        return None
    answer = read_answer(labelled_regions, shape, ids)
    if answer is not None:
        left_out[f"{part}.result"] += len(labelled["result"]) - len(own)
    return answer


def _read_data(data: Mapping[str, Any], shape: Shape, where: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the content of an item, and the ids of its candidates."""
    content: dict[str, Any] = {}
    ids: list[str] = []
    used = {_RECORD, _POSITIONS}
    strings = [name for name, value in data.items() if isinstance(value, str) and name not in used]
    main = next((name for name in TEXT_KEYS if name in strings), None)
    if shape.kind == "preference":
        pair = _PAIR if set(_PAIR) <= set(strings) else [name for name in strings if name != main][:2]
        if len(pair) == 2:
            content["candidates"] = [data[name] for name in pair]
            used.update(pair)
    if "candidates" not in content and (listed := _candidate_key(data, shape)) is not None:
        content["candidates"] = [candidate["body"] for candidate in data[listed]]
        ids = [candidate["id"] for candidate in data[listed]]
        used.add(listed)
    if is_dialogue(data.get("dialogue")):
        content["prompt"] = [dict(turn) for turn in data["dialogue"]]
        used.add("dialogue")
        if data.get("text") == shown_text(content, last_turn=shape.kind == "spans"):
            used.add("text")
    else:
        key = text_key([name for name in strings if name not in (*used, "answer")], shape, "data", where)
        content["prompt"] = user_prompt(data[key])
        used.add(key)
    if "answer" in strings and "answer" not in used:
        content["answer"] = data["answer"]
        used.add("answer")
    if meta := {name: value for name, value in data.items() if name not in used}:
        content["meta"] = meta
    return content, ids


def _write_data(content: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    prompt = content.get("prompt")
    data: dict[str, Any] = {"text": shown_text(content, last_turn=shape.kind == "spans")}
    if prompt is not None and not is_simple(prompt):
        data["dialogue"] = [dict(turn) for turn in prompt]
    elif shape.kind == "conversation":
        # The tag that shows a chat needs one.
        data["dialogue"] = user_prompt(data["text"])
    candidates = content.get("candidates")
    if candidates is not None and shape.kind == "preference" and len(candidates) == 2:
        data.update(zip(_PAIR, candidates, strict=True))
    elif candidates is not None:
        data["candidates"] = [
            {"id": str(number), "title": "", "body": candidate} for number, candidate in enumerate(candidates)
        ]
    if content.get("answer") is not None:
        data["answer"] = content["answer"]
    return {**(content.get("meta") or {}), **data}


def _candidate_key(data: Mapping[str, Any], shape: Shape) -> str | None:
    if shape.kind not in ("ranking", "preference") and "candidates" not in data:
        return None
    for name in ("candidates", *data):
        value = data.get(name)
        if isinstance(value, list) and len(value) > 1 and all(_is_candidate(each) for each in value):
            return name
    return None


def _is_candidate(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("body"), str) and isinstance(value.get("id"), str)


def _objects(values: Any) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _time(value: Any) -> str | None:
    """Returns one of the tool's times in UTC and ISO format; None for anything else."""
    try:
        time = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
