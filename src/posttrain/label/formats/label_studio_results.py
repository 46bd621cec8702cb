"""Answers as the results of Label Studio's controls: a region for each, or one for each span and turn."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from posttrain.label.formats.codec import (
    Shape,
    Survey,
    are_strings,
    foreign_parts,
    is_dialogue,
    shown_text,
)

KEY = "label_studio"
"""Key of foreign parts in an item's ``meta``."""

# Control's name, name of the object that it is for, and type of its results, by kind of answers.
_CONTROLS = {
    "choice": ("label", "text", "choices"),
    "choices": ("labels", "text", "choices"),
    "text": ("answer", "text", "textarea"),
    "spans": ("spans", "text", "labels"),
    "rewrite": ("rewrite", "answer", "textarea"),
    "rating": ("rating", "answer", "rating"),
    "preference": ("preference", "left", "pairwise"),
    "ranking": ("ranking", "candidates", "ranker"),
    "conversation": ("conversation", "conversation", "chatmessage"),
}


def write_regions(
    answer: Any, content: Mapping[str, Any], control: tuple[str, str, str], shape: Shape, kept: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns an answer's regions, with what ``kept`` has of the regions that they were read from."""
    name, target, kind = control
    values = [] if answer is None else _region_values(answer, content, shape)
    regions: list[dict[str, Any]] = [
        {"id": f"{name}-{number}", "from_name": name, "to_name": target, "type": kind, "value": value}
        for number, value in enumerate(values, 1)
    ]
    before = kept.get("regions", [])
    if len(before) == len(regions):
        for region, parts in zip(regions, before, strict=True):
            merged = {**region, **{key: value for key, value in parts.items() if value is not None}}
            # Another answer since then: what was kept of the old one's value is wrong now.
            if read_answer([merged], shape, content) != read_answer([region], shape, content):
                merged["value"] = region["value"]
            for absent in (key for key, value in parts.items() if value is None):
                del merged[absent]
            region.clear()
            region.update(merged)
    return regions + list(kept.get("others", []))


def _region_values(answer: Any, content: Mapping[str, Any], shape: Shape) -> list[dict[str, Any]]:
    match shape.kind:
        case "choice":
            return [{"choices": [answer]}]
        case "choices":
            return [{"choices": list(answer)}]
        case "text" | "rewrite":
            return [{"text": [answer]}]
        case "rating":
            return [{"rating": answer}]
        case "preference":
            # Label Studio has no tie: it stays in the extension.
            return [{"selected": ("left", "right")[answer]}] if answer in (0, 1) else []
        case "ranking":
            ids = [candidate["id"] for candidate in _ranked_candidates(content)]
            return [{"ranker": {control_of(shape)[0]: [ids[rank] for rank in answer]}}]
        case "conversation":
            return [{"chatmessage": dict(turn)} for turn in answer]
    text = shown_text(content, last_turn=True)
    return [
        {
            "start": span["start"],
            "end": span["end"],
            "text": text[span["start"] : span["end"]],
            "labels": [span["label"]],
        }
        for span in answer
    ]


def read_answer(regions: Sequence[Mapping[str, Any]], shape: Shape, content: Mapping[str, Any]) -> Any:
    """Returns the answer of the control's regions; None if there is none that this kind can hold."""
    values = [region["value"] for region in regions if isinstance(region.get("value"), Mapping)]
    if shape.kind == "spans":
        return _read_spans(values)
    if shape.kind == "conversation":
        turns = [value.get("chatmessage") for value in values]
        return [{"role": t["role"], "content": t["content"]} for t in turns] if is_dialogue(turns) else None
    if len(values) != 1:
        return None
    value = values[0]
    match shape.kind:
        case "choice" | "choices":
            # A taxonomy's choice is a path of labels.
            chosen = value.get("choices", value.get("taxonomy"))
            labels = [label if isinstance(label, str) else _path(label) for label in _strings_or_paths(chosen)]
            if shape.kind == "choices":
                return labels if isinstance(chosen, list) else None
            return labels[0] if len(labels) == 1 else None
        case "text" | "rewrite":
            text = value.get("text")
            texts = [text] if isinstance(text, str) else text
            return "\n".join(texts) if are_strings(texts) and texts else None
        case "rating":
            rating = value.get("rating")
            return rating if isinstance(rating, int) and not isinstance(rating, bool) else None
        case "preference":
            return {"left": 0, "right": 1}.get(str(value.get("selected")))
    ranked = value.get("ranker")
    order = (
        next((each for each in ranked.values() if isinstance(each, list)), []) if isinstance(ranked, Mapping) else []
    )
    ids = [candidate["id"] for candidate in _ranked_candidates(content)]
    return [ids.index(id) for id in order] if order and set(map(str, order)) <= set(ids) else None


def _ranked_candidates(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = foreign_parts(content, KEY).get("list", {})
    return listed.get("candidates") or candidate_list(content.get("candidates") or [])


def _read_spans(values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    spans = []
    for value in values:
        labels, start, end = value.get("labels"), value.get("start"), value.get("end")
        if not are_strings(labels) or type(start) is not int or type(end) is not int:
            return None
        spans += [{"start": start, "end": end, "label": label} for label in labels or ()]
    return sorted(spans, key=lambda span: (span["start"], span["end"], span["label"]))


def survey_regions(question: str, regions: Sequence[Mapping[str, Any]], survey: Survey) -> None:
    """Notes the question of an annotation, with the kind and the labels of its regions."""
    kind = regions[0].get("type")
    values = [region["value"] for region in regions if isinstance(region.get("value"), Mapping)]
    if kind in ("choices", "taxonomy") and values:
        labels = [
            label if isinstance(label, str) else _path(label)
            for value in values
            for label in _strings_or_paths(value.get("choices", value.get("taxonomy")))
        ]
        survey.add(question, "choice" if len(labels) == 1 else "choices", tuple(labels))
    elif kind == "labels":
        survey.add(question, "spans", tuple(label for value in values for label in value.get("labels") or ()))
    else:
        kinds = {of_type: name for name, (_, _, of_type) in _CONTROLS.items() if name != "rewrite"}
        if kind in kinds:
            survey.add(question, kinds[str(kind)])


def control_of(shape: Shape) -> tuple[str, str, str]:
    """Returns the control's name, the name of the object that it is for, and the type of its results."""
    name, target, kind = _CONTROLS[shape.kind]
    return (shape.question or name), target, kind


def region_difference(region: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a region has other than ours; None for what it lacks."""
    other = {name: value for name, value in region.items() if written.get(name) != value}
    return other | {name: None for name in written if name not in region}


def span_key(region: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the key by which the regions of spans are in the order of the answer."""
    value = region.get("value", {})
    return value.get("start", 0), value.get("end", 0), str((value.get("labels") or [""])[0])


def candidate_list(candidates: Sequence[str]) -> list[dict[str, Any]]:
    """Returns candidates as the tag `List` shows them."""
    return [{"id": str(number), "title": "", "body": candidate} for number, candidate in enumerate(candidates)]


def _strings_or_paths(values: Any) -> list[Any]:
    return values if isinstance(values, list) and all(isinstance(v, str) or are_strings(v) for v in values) else []


def _path(labels: Sequence[str]) -> str:
    return " / ".join(labels)


def objects(values: Any) -> list[Mapping[str, Any]]:
    """Returns the objects of a list; none if it is no list."""
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def number(value: Any) -> float | None:
    """Returns a number as a float; None if it is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def time_text(value: Any) -> str | None:
    """Returns a time of the tool in UTC and ISO format; None if it is none."""
    try:
        time = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
