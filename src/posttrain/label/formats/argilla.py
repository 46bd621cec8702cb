"""Argilla's JSON of records: ``fields``, ``responses``, ``suggestions`` and ``metadata``, and its settings."""

import json
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

from posttrain.label.formats.codec import (
    EXTENSION,
    Codec,
    PortableAnswer,
    PortableItem,
    Shape,
    Survey,
    are_strings,
    foreign_parts,
    is_dialogue,
    is_simple,
    own_meta,
    shown_text,
    text_key,
    user_prompt,
    with_foreign,
)
from posttrain.label.formats.files import to_json
from posttrain.store.errors import UserError

_QUESTIONS = {
    "choice": "label",
    "choices": "labels",
    "text": "answer",
    "spans": "spans",
    "rewrite": "rewrite",
    "rating": "rating",
    "preference": "preference",
    "ranking": "ranking",
    "conversation": "conversation",
}
_CANDIDATE = "candidate_{}"
_KEYS = ("id", "fields", "metadata", "suggestions", "responses", "vectors", "status", "_server_id")
# Users are known by a UUID alone: that of a name is always the same.
_USERS = uuid.UUID("6f3a3b1e-6a3c-4d36-9c3e-2f6f1a0f6a11")


class Argilla(Codec):
    """A JSON array of records of Argilla 2, as ``dataset.records.to_json`` writes it and ``from_json`` reads it."""

    name = "argilla"
    key = "argilla"

    def survey(self, record: Mapping[str, Any], survey: Survey) -> None:
        fields = record.get("fields")
        names = set(fields) if isinstance(fields, Mapping) else set()
        for part in ("responses", "suggestions"):
            answers = record.get(part)
            for question, values in answers.items() if isinstance(answers, Mapping) else ():
                for entry in values if isinstance(values, list) else [values]:
                    if isinstance(entry, Mapping) and entry.get("value") is not None:
                        _survey_value(str(question), entry["value"], names, survey)

    def read(self, record: Mapping[str, Any], shape: Shape, where: str, foreign: Counter[str]) -> PortableItem:
        fields = record.get("fields")
        if not isinstance(fields, Mapping):
            raise UserError("a record has an object `fields`", where=where)
        content, options, parts = _read_fields(fields, shape, where)
        if metadata := {key: value for key, value in _mapping(record.get("metadata")).items() if key != EXTENSION}:
            content["meta"] = metadata
        question = _question(shape)
        answers, other_responses = self._responses(record, shape, options)
        suggestion = None
        other_suggestions = dict(_mapping(record.get("suggestions")))
        proposed = _mapping(other_suggestions.get(question))
        if (answer := _read_value(proposed.get("value"), shape, options)) is not None:
            score = proposed.get("score")
            number = float(score) if isinstance(score, int | float) else None
            suggestion = {"answer": answer, "confidence": number, "annotator": proposed.get("agent")}
            del other_suggestions[question]
            if score is not None and number is None:
                parts["score"] = score
        rest = {name: value for name, value in record.items() if name not in _KEYS}
        for name in ("vectors", "_server_id"):
            if record.get(name):
                rest[name] = record[name]
        foreign.update(list(rest))
        foreign.update(f"fields.{name}" for name in parts.get("fields", ()))
        foreign.update(f"responses.{name}" for name in other_responses)
        foreign.update(f"suggestions.{name}" for name in other_suggestions)
        parts |= {"record": rest, "responses": other_responses, "suggestions": other_suggestions}
        return PortableItem(
            record=None if record.get("id") is None else str(record["id"]),
            content=with_foreign(content, self.key, parts),
            suggestion=suggestion,
            answers=answers,
        )

    def write(self, item: PortableItem, shape: Shape) -> dict[str, Any]:
        parts = foreign_parts(item.content, self.key)
        question, options = _question(shape), _options(item.content, parts)
        responses: dict[str, list[dict[str, Any]]] = {}
        for answer in item.answers:
            status = "discarded" if answer.answer is None else "submitted"
            value = None if answer.answer is None else _write_value(answer.answer, shape, options)
            entry = {"value": value, "user_id": _user_id(answer.annotator), "status": status}
            responses.setdefault(question, []).append(entry)
        for name, entries in parts.get("responses", {}).items():
            responses[name] = responses.get(name, []) + list(entries)
        suggestions = {}
        if item.suggestion is not None:
            suggestions[question] = {
                "value": _write_value(item.suggestion.get("answer"), shape, options),
                "score": parts.get("score", item.suggestion.get("confidence")),
                "agent": item.suggestion.get("annotator"),
            }
        done = any(answer.status == "answered" for answer in item.answers)
        return {
            "id": item.record,
            "fields": _write_fields(item.content, shape, parts),
            "metadata": own_meta(item.content, self.key),
            "suggestions": {**suggestions, **parts.get("suggestions", {})},
            "responses": responses,
            "vectors": {},
            "status": "completed" if done else "pending",
            "_server_id": None,
            **parts.get("record", {}),
        }

    def extension(self, record: Mapping[str, Any]) -> Any:
        text = _mapping(record.get("metadata")).get(EXTENSION)
        try:
            return None if text is None else json.loads(text)
        except (ValueError, TypeError, RecursionError):
            return text  # which is no object, and is reported as damaged

    def extend(self, record: dict[str, Any], extension: dict[str, Any]) -> None:
        # As a text: metadata of Argilla are texts and numbers.
        record["metadata"] = {**record["metadata"], EXTENSION: to_json(extension)}

    def _responses(
        self, record: Mapping[str, Any], shape: Shape, options: list[str]
    ) -> tuple[tuple[PortableAnswer, ...], dict[str, Any]]:
        """Returns the answers to the question, and all other responses by question."""
        question, answers = _question(shape), dict[str, PortableAnswer]()
        others: dict[str, Any] = {}
        for name, entries in _mapping(record.get("responses")).items():
            for entry in entries if isinstance(entries, list) else [entries]:
                given = _mapping(entry)
                user = str(given.get("user_id") or "")
                skipped = given.get("status") == "discarded"
                value = None if skipped else _read_value(given.get("value"), shape, options)
                # A draft may be half an answer.
                usable = name == question and given.get("status") != "draft" and (skipped or value is not None)
                if usable and user not in answers and not set(given) - {"value", "user_id", "status"}:
                    if skipped and given.get("value") is not None:
                        others.setdefault(name, []).append(entry)
                        continue
                    answers[user] = PortableAnswer(user, value, "skipped" if skipped else "answered")
                else:
                    others.setdefault(name, []).append(entry)
        return tuple(answers.values()), others


def argilla_settings(shape: Shape, candidates: int = 2) -> dict[str, Any]:
    """Returns the settings of a dataset for records that are written for ``shape``, as ``Settings.from_json`` reads.

    Args:
        candidates: Number of candidates of an item of the kinds ``preference`` and ``ranking``.
    """
    fields = [_field("text")]
    if shape.kind in ("rewrite", "rating"):
        fields.append(_field("answer"))
    options = [_CANDIDATE.format(number + 1) for number in range(candidates)]
    if shape.kind in ("preference", "ranking"):
        fields += [_field(name) for name in options]
    labels = [{"value": label, "text": label, "description": None} for label in shape.labels or ()]
    compared = [{"value": name, "text": name, "description": None} for name in options]
    kind = {
        "choice": {"type": "label_selection", "options": labels, "visible_options": None},
        "choices": {"type": "multi_label_selection", "options": labels, "visible_options": None},
        "spans": {
            "type": "span",
            "options": labels,
            "field": "text",
            "visible_options": None,
            "allow_overlapping": True,
        },
        "rating": {"type": "rating", "options": [{"value": number} for number in range(1, 6)]},
        "preference": {
            "type": "label_selection",
            "options": [*compared, {"value": "tie", "text": "tie", "description": None}],
            "visible_options": None,
        },
        "ranking": {"type": "ranking", "options": compared},
    }.get(shape.kind, {"type": "text", "use_markdown": False})
    name = _question(shape)
    question = {"name": name, "title": name, "description": None, "required": True, "settings": kind}
    return {
        "guidelines": None,
        "questions": [question],
        "fields": fields,
        "vectors": [],
        "metadata": [],
        "allow_extra_metadata": True,
        "distribution": {"strategy": "overlap", "min_submitted": 1},
        "mapping": None,
    }


def _field(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "title": name,
        "required": name == "text",
        "settings": {"type": "text", "use_markdown": False},
    }


def _read_fields(
    fields: Mapping[str, Any], shape: Shape, where: str
) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """Returns the content of an item, the names of its candidates, and what has no place in it."""
    content: dict[str, Any] = {}
    strings = [name for name, value in fields.items() if isinstance(value, str)]
    parts: dict[str, Any] = {}
    used: set[str] = set()
    chats = [name for name, value in fields.items() if is_dialogue(value)]
    if chats:
        content["prompt"] = [{"role": turn["role"], "content": turn["content"]} for turn in fields[chats[0]]]
        used.add(chats[0])
        if fields.get("text") == shown_text(content, last_turn=shape.kind == "spans"):
            used.add("text")
        if chats[0] != "dialogue" or "text" not in used:
            parts["chat"] = {"key": chats[0], "text": "text" in used}
    else:
        key = text_key([name for name in strings if name != "answer"], shape, "fields", where)
        content["prompt"] = user_prompt(fields[key])
        used.add(key)
        if key != "text":
            parts["text_key"] = key
    options: list[str] = []
    if shape.kind in ("preference", "ranking"):
        options = [name for name in strings if name not in used]
        content["candidates"] = [fields[name] for name in options]
        used.update(options)
        if options != [_CANDIDATE.format(number + 1) for number in range(len(options))]:
            parts["options"] = options
    elif "answer" in strings and "answer" not in used:
        content["answer"] = fields["answer"]
        used.add("answer")
    parts["fields"] = {name: value for name, value in fields.items() if name not in used}
    return content, options, parts


def _write_fields(content: Mapping[str, Any], shape: Shape, parts: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    chat, prompt = parts.get("chat", {}), content.get("prompt")
    text = shown_text(content, last_turn=shape.kind == "spans")
    if prompt is not None and (chat or not is_simple(prompt)):
        if chat.get("text", True):
            fields["text"] = text
        fields[chat.get("key", "dialogue")] = [dict(turn) for turn in prompt]
    else:
        fields[parts.get("text_key", "text")] = text
    for name, candidate in zip(_options(content, parts), content.get("candidates") or (), strict=False):
        fields[name] = candidate
    if content.get("answer") is not None:
        fields["answer"] = content["answer"]
    return {**fields, **parts.get("fields", {})}


def _options(content: Mapping[str, Any], parts: Mapping[str, Any]) -> list[str]:
    candidates = content.get("candidates") or ()
    named = parts.get("options", ())
    return list(named) if len(named) == len(candidates) else [_CANDIDATE.format(n + 1) for n in range(len(candidates))]


def _write_value(answer: Any, shape: Shape, options: list[str]) -> Any:
    match shape.kind:
        case "preference":
            return answer if answer == "tie" else options[answer]
        case "ranking":
            return [options[rank] for rank in answer]
        case "conversation":
            return to_json(answer)
        case "spans" | "choices":
            return [dict(part) if isinstance(part, Mapping) else part for part in answer]
    return answer


def _read_value(value: Any, shape: Shape, options: list[str]) -> Any:
    """Returns the answer of a response's value; None if it is none that this kind can hold."""
    match shape.kind:
        case "choice" | "text" | "rewrite":
            return value if isinstance(value, str) else None
        case "choices":
            return list(value) if are_strings(value) else None
        case "rating":
            return value if isinstance(value, int) and not isinstance(value, bool) else None
        case "preference":
            named = isinstance(value, str) and value in options
            return "tie" if value == "tie" else (options.index(value) if named else None)
        case "ranking":
            ranked = [_mapping(each).get("value", each) for each in value] if isinstance(value, list) else []
            return (
                [options.index(name) for name in ranked] if ranked and set(map(str, ranked)) <= set(options) else None
            )
        case "conversation":
            try:
                turns = json.loads(value) if isinstance(value, str) else None
            except (ValueError, RecursionError):
                return None
            return turns if is_dialogue(turns) else None
    if not isinstance(value, list) or not all({"start", "end", "label"} <= set(_mapping(span)) for span in value):
        return None
    spans = [{name: span[name] for name in ("start", "end", "label")} for span in value]
    return sorted(spans, key=lambda span: (span["start"], span["end"], str(span["label"])))


def _survey_value(question: str, value: Any, fields: set[str], survey: Survey) -> None:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        survey.add(question, "rating")
    elif isinstance(value, str) and value in fields:
        survey.add(question, "preference")
    elif isinstance(value, str):
        survey.add(question, "label or text", (value,))
    elif isinstance(value, list) and value and all("label" in _mapping(span) for span in value):
        survey.add(question, "spans", tuple(str(span["label"]) for span in value))
    elif isinstance(value, list):
        names = [_mapping(each).get("value", each) for each in value]
        if len(names) > 1 and set(map(str, names)) <= fields:
            survey.add(question, "ranking")
        elif are_strings(value):
            survey.add(question, "choices", tuple(value))


def _question(shape: Shape) -> str:
    return shape.question or _QUESTIONS[shape.kind]


def _user_id(annotator: str) -> str:
    try:
        return annotator if str(uuid.UUID(annotator)) == annotator else str(uuid.uuid5(_USERS, annotator))
    except ValueError:
        return str(uuid.uuid5(_USERS, annotator))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
