"""Answers as the results of Label Studio's controls: one region, or one for each span and turn."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from posttrain.label.formats.items import Shape, Survey, are_strings, is_dialogue


class Control(NamedTuple):
    """A control of the labelling interface: its name, the name of the object that it labels, its results' type."""

    name: str
    target: str
    type: str


_CONTROLS = {
    "choice": Control("label", "text", "choices"),
    "choices": Control("labels", "text", "choices"),
    "text": Control("answer", "text", "textarea"),
    "spans": Control("spans", "text", "labels"),
    "rewrite": Control("rewrite", "answer", "textarea"),
    "rating": Control("rating", "answer", "rating"),
    "preference": Control("preference", "left", "pairwise"),
    "ranking": Control("ranking", "candidates", "ranker"),
    "conversation": Control("conversation", "conversation", "chatmessage"),
}

_KIND_OF_TYPE = {control.type: kind for kind, control in _CONTROLS.items() if kind not in ("choices", "rewrite")}


def control_of(kind: str) -> Control:
    """Returns the control for a kind of answers."""
    return _CONTROLS[kind]


def write_regions(answer: Any, shape: Shape) -> list[dict[str, Any]]:
    """Returns an answer's regions; spans hold their words, as `positions.write_positions` returns them."""
    control = control_of(shape.kind)
    return [
        {
            "id": f"{control.name}-{number}",
            "from_name": control.name,
            "to_name": control.target,
            "type": control.type,
            "value": value,
        }
        for number, value in enumerate(_region_values(answer, shape), 1)
    ]


def _region_values(answer: Any, shape: Shape) -> list[dict[str, Any]]:
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
            # A tie is a comparison that was submitted without a choice.
            return [] if answer == "tie" else [{"selected": ("left", "right")[answer]}]
        case "ranking":
            return [{"ranker": {control_of(shape.kind).name: [str(rank) for rank in answer]}}]
        case "conversation":
            return [{"chatmessage": dict(turn)} for turn in answer]
    return [{**{name: span[name] for name in ("start", "end", "text")}, "labels": [span["label"]]} for span in answer]


def read_answer(regions: Sequence[Mapping[str, Any]], shape: Shape, ids: Sequence[str]) -> Any:
    """Returns the answer of a control's regions; None if there is none that this kind can hold.

    Args:
        regions: The regions.
        shape: The kind of the answers.
        ids: Ids of the task's candidates, which a ranking names.
    """
    values = [region["value"] for region in regions if isinstance(region.get("value"), Mapping)]
    if shape.kind == "spans":
        return _read_spans(values)
    if shape.kind == "conversation":
        turns = [value.get("chatmessage") for value in values]
        return [{"role": t["role"], "content": t["content"]} for t in turns] if is_dialogue(turns) else None
    if not regions and shape.kind in ("preference", "choices"):
        # Submitted without a choice: a tie, or no label at all.
        return "tie" if shape.kind == "preference" else []
    if len(values) != 1:
        return None
    value = values[0]
    match shape.kind:
        case "choice" | "choices":
            labels = _labels(value)
            if shape.kind == "choices":
                return labels
            return labels[0] if labels and len(labels) == 1 else None
        case "text" | "rewrite":
            text = value.get("text")
            texts = [text] if isinstance(text, str) else text
            return "\n".join(texts) if are_strings(texts) and texts else None
        case "rating":
            return value.get("rating")
        case "preference":
            return {"left": 0, "right": 1}.get(str(value.get("selected")))
    ranked = value.get("ranker")
    orders = ranked.values() if isinstance(ranked, Mapping) else ()
    order = next((each for each in orders if isinstance(each, list)), [])
    return [ids.index(id) for id in order] if order and set(map(str, order)) <= set(ids) else None


def _read_spans(values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    spans = []
    for value in values:
        labels, start, end = value.get("labels"), value.get("start"), value.get("end")
        if not are_strings(labels) or type(start) is not int or type(end) is not int:
            return None
        # The text is beside the positions, whose unit differs by the tool's version.
        text = {"text": value["text"]} if isinstance(value.get("text"), str) else {}
        spans += [{"start": start, "end": end, "label": label, **text} for label in labels or ()]
    return spans


def has_labels(region: Mapping[str, Any]) -> bool:
    """Returns True unless the region's labels are missing or empty."""
    value = region.get("value")
    return not isinstance(value, Mapping) or value.get("labels") not in (None, [])


def survey_regions(question: str, regions: Sequence[Mapping[str, Any]], survey: Survey) -> None:
    """Notes the question of an annotation, with the kind and the labels of its regions."""
    kind = regions[0].get("type")
    values = [region["value"] for region in regions if isinstance(region.get("value"), Mapping)]
    if kind in ("choices", "taxonomy") and values:
        labels = [label for value in values for label in _labels(value) or ()]
        survey.add(question, "choice" if len(labels) == 1 else "choices", labels)
    elif kind == "labels":
        survey.add(question, "spans", [label for value in values for label in value.get("labels") or ()])
    elif kind == "textarea" and regions[0].get("to_name") == control_of("rewrite").target:
        survey.add(question, "rewrite")
    elif kind in _KIND_OF_TYPE:
        survey.add(question, _KIND_OF_TYPE[str(kind)])


def _labels(value: Mapping[str, Any]) -> list[str] | None:
    """Returns the labels of a choice; a taxonomy's label is the path to it."""
    chosen = value.get("choices", value.get("taxonomy"))
    if not isinstance(chosen, list) or not all(isinstance(label, str) or are_strings(label) for label in chosen):
        return None
    return [label if isinstance(label, str) else " / ".join(label) for label in chosen]
