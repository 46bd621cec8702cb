"""Label Studio's JSON of tasks: ``data``, ``annotations`` and ``predictions``, and its labelling interface."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any
from xml.sax.saxutils import quoteattr

from posttrain.label.formats.codec import (
    EXTENSION,
    TEXT_KEYS,
    Codec,
    PortableAnswer,
    PortableItem,
    Shape,
    Survey,
    foreign_parts,
    is_dialogue,
    is_simple,
    own_meta,
    shown_text,
    text_key,
    user_prompt,
    with_foreign,
)
from posttrain.label.formats.label_studio_results import (
    KEY,
    candidate_list,
    control_of,
    number,
    objects,
    read_answer,
    region_difference,
    span_key,
    survey_regions,
    time_text,
    write_regions,
)
from posttrain.store.errors import UserError

_OWN_KEYS = ("dialogue", "answer", "left", "right", "candidates")
_ANNOTATION_KEYS = ("completed_by", "result", "was_cancelled", "ground_truth", "lead_time", "created_at")
# Of the server's own tables; kept, and counted together.
_BOOKKEEPING = frozenset(
    (
        *(
            "id",
            "file_upload",
            "drafts",
            "created_at",
            "updated_at",
            "inner_id",
            "total_annotations",
            "total_predictions",
        ),
        *("cancelled_annotations", "comment_count", "unresolved_comment_count", "last_comment_updated_at", "project"),
        *("updated_by", "comment_authors", "draft_created_at", "prediction", "result_count", "unique_id", "import_id"),
        *("last_action", "bulk_created", "task", "parent_prediction", "parent_annotation", "last_created_by"),
        *("created_ago", "cluster", "neighbors", "mislabeling", "model", "model_run"),
    )
)
_GOLD, _GOLD_KEY = "gold", "ground truth"


class LabelStudio(Codec):
    """A JSON array of tasks, as *Export → JSON* and *Import* have it."""

    name = "label-studio"
    key = KEY

    def survey(self, record: Mapping[str, Any], survey: Survey) -> None:
        for part in ("annotations", "predictions"):
            for labelled in objects(record.get(part)):
                questions: dict[str, list[Mapping[str, Any]]] = {}
                for region in objects(labelled.get("result")):
                    questions.setdefault(str(region.get("from_name")), []).append(region)
                for question, regions in questions.items():
                    survey_regions(question, regions, survey)

    def read(self, record: Mapping[str, Any], shape: Shape, where: str, foreign: Counter[str]) -> PortableItem:
        data = record.get("data")
        if not isinstance(data, Mapping):
            raise UserError("a task has an object `data`", where=where)
        reader = _TaskReader(shape, foreign)
        content, parts = _read_data(data, shape, where)
        # With the ids of its candidates, which a ranking names.
        known = with_foreign(content, self.key, parts)
        answers, expected, annotation_parts = reader.annotations(record, known)
        suggestion, prediction_parts = reader.predictions(record, known)
        meta = record.get("meta")
        own = meta if isinstance(meta, Mapping) else {}
        rest: dict[str, Any] = {
            name: value for name, value in record.items() if name not in ("data", "annotations", "predictions", "meta")
        }
        if others := {name: value for name, value in own.items() if name != EXTENSION}:
            rest["meta"] = others
        _count(foreign, "", rest)
        parts |= {"task": rest, **annotation_parts, **prediction_parts}
        identity = record.get("id")
        return PortableItem(
            record=None if identity is None else str(identity),
            content=with_foreign(content, self.key, parts),
            suggestion=suggestion,
            expected=expected,
            answers=answers,
        )

    def write(self, item: PortableItem, shape: Shape) -> dict[str, Any]:
        parts = foreign_parts(item.content, self.key)
        task: dict[str, Any] = {"data": _write_data(item.content, shape, parts, own_meta(item.content, self.key))}
        control, of_annotator = control_of(shape), dict(parts.get("annotations", {}))
        annotations = []
        if item.expected is not None:
            annotations.append(
                _write_annotation(_GOLD, item.expected, item, control, shape, of_annotator.get(_GOLD_KEY, {}))
            )
            annotations[0] |= {"ground_truth": True, "was_cancelled": False}
        for answer in item.answers:
            # Of an annotation that did not say whose it is; it was the first without a name.
            kept = of_annotator.get(answer.annotator) or of_annotator.pop("", {})
            annotation = _write_annotation(answer.annotator, answer.answer, item, control, shape, kept)
            annotation["was_cancelled"] = answer.answer is None
            if (seconds := answer.details.get("seconds")) is not None:
                annotation["lead_time"] = seconds
            if (created := answer.details.get("created_at")) is not None and "created_at" not in kept:
                annotation["created_at"] = created.replace("+00:00", "Z")
            annotations.append(annotation)
        task["annotations"] = annotations + list(parts.get("other_annotations", []))
        task["predictions"] = list(parts.get("other_predictions", []))
        if item.suggestion is not None:
            kept = parts.get("prediction", {})
            regions = write_regions(item.suggestion.get("answer"), item.content, control, shape, kept)
            prediction = {**kept.get("keys", {}), "result": regions}
            for name, value in (("annotator", "model_version"), ("confidence", "score")):
                if item.suggestion.get(name) is not None:
                    prediction[value] = item.suggestion[name]
            task["predictions"].insert(0, prediction)
        rest = parts.get("task", {})
        return {**{name: value for name, value in rest.items() if name != "meta"}, **task, "meta": rest.get("meta", {})}

    def extension(self, record: Mapping[str, Any]) -> Any:
        meta = record.get("meta")
        return meta.get(EXTENSION) if isinstance(meta, Mapping) else None

    def extend(self, record: dict[str, Any], extension: dict[str, Any]) -> None:
        record["meta"] = {**record["meta"], EXTENSION: extension}


def labelling_interface(shape: Shape) -> str:
    """Returns the labelling interface (XML) of a project for the tasks that are written for ``shape``."""
    name, _, _ = control_of(shape)
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


class _TaskReader:
    """Reads the annotations and predictions of tasks."""

    def __init__(self, shape: Shape, foreign: Counter[str]) -> None:
        self.shape, self.foreign, self.control = shape, foreign, control_of(shape)

    def annotations(
        self, record: Mapping[str, Any], content: Mapping[str, Any]
    ) -> tuple[tuple[PortableAnswer, ...], Any, dict[str, Any]]:
        answers: dict[str, PortableAnswer] = {}
        parts: dict[str, dict[str, Any]] = {}
        others: list[Any] = []
        expected = None
        for annotation in record.get("annotations") or []:
            parsed = self._annotation(annotation, content)
            if parsed is None:
                others.append(annotation)
                self.foreign["annotations"] += 1
                continue
            answer, is_gold, kept = parsed
            taken = expected is not None if is_gold else answer.annotator in answers
            if taken:
                # Only one answer of an annotator to an item counts.
                others.append(annotation)
                self.foreign["annotations"] += 1
                continue
            _count(self.foreign, "annotations.", kept.get("keys", ()))
            self.foreign["annotations.result"] += len(kept.get("others", ()))
            if is_gold:
                expected = answer.answer
                # A right answer has no row of its own for these.
                times = {name: annotation[name] for name in ("lead_time", "created_at") if name in annotation}
                kept = {**kept, "keys": {**kept["keys"], **times}}
            else:
                answers[answer.annotator] = answer
            if kept := {name: value for name, value in kept.items() if value}:
                parts[_GOLD_KEY if is_gold else answer.annotator] = kept
        return tuple(answers.values()), expected, {"annotations": parts, "other_annotations": others}

    def predictions(
        self, record: Mapping[str, Any], content: Mapping[str, Any]
    ) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        suggestion, kept = None, {}
        others: list[Any] = []
        for prediction in record.get("predictions") or []:
            answer, regions = self._regions(prediction, content)
            if suggestion is not None or answer is None:
                others.append(prediction)
                self.foreign["predictions"] += 1
                continue
            keys = {
                name: value
                for name, value in prediction.items()
                if name not in ("result", "model_version", "score") or value is None
            }
            suggestion = {
                "answer": answer,
                "confidence": number(prediction.get("score")),
                "annotator": prediction.get("model_version"),
            }
            _count(self.foreign, "predictions.", keys)
            kept = {name: value for name, value in {"keys": keys, **regions}.items() if value}
        return suggestion, {"prediction": kept, "other_predictions": others}

    def _annotation(
        self, annotation: Any, content: Mapping[str, Any]
    ) -> tuple[PortableAnswer, bool, dict[str, Any]] | None:
        if not isinstance(annotation, Mapping):
            return None
        answer, kept = self._regions(annotation, content)
        skipped = annotation.get("was_cancelled") is True
        if answer is None and not skipped:
            return None
        by = annotation.get("completed_by")
        name = by.get("email", by.get("id")) if isinstance(by, Mapping) else by
        annotator = "" if name is None else str(name)
        keys = {key: value for key, value in annotation.items() if key not in _ANNOTATION_KEYS}
        if by != {"email": annotator}:
            keys["completed_by"] = by
        details: dict[str, Any] = {}
        if (seconds := number(annotation.get("lead_time"))) is not None:
            details["seconds"] = seconds
        if (created := annotation.get("created_at")) is not None:
            time = time_text(created)
            if time is not None:
                details["created_at"] = time
            if time is None or time.replace("+00:00", "Z") != created:
                keys["created_at"] = created
        status = "skipped" if skipped else "answered"
        read = PortableAnswer(annotator, None if skipped else answer, status, details)
        return read, annotation.get("ground_truth") is True and not skipped, {"keys": keys, **kept}

    def _regions(self, labelled: Any, content: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns the answer of an annotation or a prediction, None if there is none, and what else is in it."""
        raw = labelled.get("result") if isinstance(labelled, Mapping) else None
        if not isinstance(raw, list):
            return None, {}
        name, _, kind = self.control
        own = [region for region in raw if isinstance(region, Mapping) and region.get("from_name") == name]
        own = [region for region in own if region.get("type") in (kind, "taxonomy" if kind == "choices" else kind)]
        answer = read_answer(own, self.shape, content)
        others = [region for region in raw if region not in own] if answer is not None else []
        if answer is None:
            return None, {}
        written = write_regions(answer, content, self.control, self.shape, {})
        if self.shape.kind == "spans":
            own = sorted(own, key=span_key)
        same = len(written) == len(own)
        if not same:
            self.foreign["annotations.result.id"] += len(own)
        regions = [region_difference(*pair) for pair in zip(own, written, strict=True)] if same else []
        return answer, {"regions": regions if any(regions) else [], "others": others}


def _read_data(data: Mapping[str, Any], shape: Shape, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the content of an item, and the names of keys that are not ours."""
    content: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    used: set[str] = set()
    dialogue = data.get("dialogue")
    strings = [name for name, value in data.items() if isinstance(value, str)]
    main = next((name for name in TEXT_KEYS if name in strings), None)
    if shape.kind == "preference":
        pair = ["left", "right"] if {"left", "right"} <= set(strings) else [s for s in strings if s != main][:2]
        if pair[:1] and len(pair) == 2:
            content["candidates"] = [data[name] for name in pair]
            used.update(pair)
            if pair != ["left", "right"]:
                parts["pair"] = pair
    if "candidates" not in content:
        listed = _candidate_key(data, shape)
        if listed is not None:
            content["candidates"] = [candidate["body"] for candidate in data[listed]]
            used.add(listed)
            if data[listed] != candidate_list(content["candidates"]) or listed != "candidates":
                parts["list"] = {"key": listed, "candidates": [dict(candidate) for candidate in data[listed]]}
    if is_dialogue(dialogue):
        content["prompt"] = [dict(turn) for turn in dialogue]  # type: ignore[union-attr]
        used.add("dialogue")
        if data.get("text") == shown_text(content, last_turn=shape.kind == "spans"):
            used.add("text")
    else:
        free = [name for name in strings if name not in used and name != "answer"]
        key = text_key(free, shape, "data", where)
        content["prompt"] = user_prompt(data[key])
        used.add(key)
        if key != "text":
            parts["text_key"] = key
    if isinstance(data.get("answer"), str) and "answer" not in used:
        content["answer"] = data["answer"]
        used.add("answer")
    if meta := {name: value for name, value in data.items() if name not in used}:
        content["meta"] = meta
    return content, parts


def _write_data(
    content: Mapping[str, Any], shape: Shape, parts: Mapping[str, Any], meta: Mapping[str, Any]
) -> dict[str, Any]:
    prompt = content.get("prompt")
    key = parts.get("text_key", "text")
    data: dict[str, Any] = {key: shown_text(content, last_turn=shape.kind == "spans")}
    if prompt is not None and not is_simple(prompt):
        data["dialogue"] = [dict(turn) for turn in prompt]
    elif shape.kind == "conversation":
        # The tag that shows a chat needs one.
        data["dialogue"] = user_prompt(data[key])
    candidates = content.get("candidates")
    if candidates is not None:
        listed = parts.get("list", {})
        if shape.kind == "preference" and len(candidates) == 2 and not listed:
            data.update(zip(parts.get("pair", ("left", "right")), candidates, strict=True))
        else:
            data[listed.get("key", "candidates")] = listed.get("candidates", candidate_list(candidates))
    if content.get("answer") is not None:
        data["answer"] = content["answer"]
    # A key that has a meaning here stays in the extension.
    return data | {name: value for name, value in meta.items() if name not in data and name not in _OWN_KEYS}


def _write_annotation(
    annotator: str,
    answer: Any,
    item: PortableItem,
    control: tuple[str, str, str],
    shape: Shape,
    kept: Mapping[str, Any],
) -> dict[str, Any]:
    regions = write_regions(answer, item.content, control, shape, kept)
    return {"completed_by": {"email": annotator}, "result": regions, "ground_truth": False, **kept.get("keys", {})}


def _count(foreign: Counter[str], part: str, names: Iterable[str]) -> None:
    for name in names:
        # Who answered is taken; only the rest of the account is not.
        if name != "completed_by":
            foreign["bookkeeping of the server" if name in _BOOKKEEPING else f"{part}{name}"] += 1


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
