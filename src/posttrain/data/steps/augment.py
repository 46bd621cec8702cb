"""Adds variants of training records."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import pyarrow as pa
import pyarrow.compute
from pydantic import Discriminator, Field, Tag

from posttrain.data.augment.method import AugmentMethod, record_generator
from posttrain.data.augment.rewording import Paraphrase, Templates
from posttrain.data.augment.word_edits import Noise, Synonyms, Typos
from posttrain.data.records.outcome import Outcome
from posttrain.data.records.record import CHANGED, REJECTED, assign_ids, records
from posttrain.data.steps.step import RowStep


def _method_name(value: Any) -> Any:
    return value.get("method") if isinstance(value, Mapping) else getattr(value, "method", None)


# By a function: pydantic takes no field by name that a validator of all fields, such as `Section` has, sees first.
AnyMethod = Annotated[
    Annotated[Typos, Tag("typos")]
    | Annotated[Synonyms, Tag("synonyms")]
    | Annotated[Noise, Tag("noise")]
    | Annotated[Templates, Tag("templates")]
    | Annotated[Paraphrase, Tag("paraphrase")],
    Discriminator(_method_name),
]


class Augment(RowStep):
    """Adds variants after each record, marked in ``meta``: ``augmented`` with the method and the id of the record.

    The input varies: the last turn of the prompt, if it is the user's, or the text; the answer stays. A record and its
    variants are one group, so that no later split separates them. Records that are variants or synthetic are varied
    like others. A variant depends on the seed, the record's id and the method alone.
    """

    name: ClassVar[str] = "augment"
    version: ClassVar[int] = 2
    training_only: ClassVar[bool] = True

    methods: tuple[AnyMethod, ...] = Field(min_length=1, description="Ways to vary records; each adds its own.")
    seed: int = Field(0, ge=0, description="Seed of all random choices.")

    def located(self, root: Path) -> Self:
        return self.model_copy(update={"methods": tuple(method.located(root) for method in self.methods)})

    def check(self) -> None:
        for method in self.methods:
            method.check()

    def key(self) -> dict[str, Any]:
        return {
            "step": self.name,
            "version": self.version,
            "methods": [method.key() for method in self.methods],
            "seed": self.seed,
        }

    def apply(self, table: pa.Table) -> Outcome:
        originals = table.to_pylist()
        variants: dict[int, list[tuple[str, dict[str, Any]]]] = {}
        for number, method in enumerate(self.methods):
            # The number keeps two methods of one kind from drawing the same variants.
            earlier = sum(other.method == method.method for other in self.methods[:number])
            name = method.method if not earlier else f"{method.method} {earlier + 1}"
            for copy in range(method.copies):
                for row, values in self._variants(originals, method, name, copy).items():
                    variants.setdefault(row, []).append((name, values))
        if not variants:
            return Outcome(table, REJECTED.empty_table(), CHANGED.empty_table())
        return _insert_variants(table, originals, variants)

    def _variants(
        self, originals: list[dict[str, Any]], method: AugmentMethod, method_name: str, copy: int
    ) -> dict[int, dict[str, Any]]:
        """Returns by row the columns in which its variant differs."""
        # A generator for each record, not one for all: a variant must not change when records before it come or go.
        rngs = [record_generator(self.seed, record["id"], method_name, copy) for record in originals]
        if method.share < 1:
            rows = [row for row, rng in enumerate(rngs) if rng.random() < method.share]
        else:
            rows = list(range(len(originals)))
        rows = [row for row in rows if _varied_text(originals[row]) is not None]
        texts = [str(_varied_text(originals[row])) for row in rows]
        labels = [originals[row]["completion"] for row in rows]
        new = method.texts(texts, labels, [rngs[row] for row in rows], copy)
        return {
            row: _with_text(originals[row], after)
            for row, before, after in zip(rows, texts, new, strict=True)
            # A variant without text would be a broken record, and one equal to its record adds nothing.
            if after is not None and after.strip() and after != before
        }


def _insert_variants(
    table: pa.Table, originals: list[dict[str, Any]], variants: Mapping[int, list[tuple[str, dict[str, Any]]]]
) -> Outcome:
    """Inserts the variants after their records."""
    new_records: list[dict[str, Any]] = []
    origins: list[tuple[int, str]] = []
    for row in sorted(variants):
        record = originals[row]
        for method, values in variants[row]:
            meta = json.loads(record["meta"] or "{}")
            meta = {**meta, "augmented": {"method": method, "of": record["id"]}}
            text = json.dumps(meta, ensure_ascii=False, sort_keys=True)
            new_records.append({**record, **values, "meta": text, "group": record["group"] or record["id"]})
            origins.append((row, method))
    new = assign_ids(records(new_records))
    # A variant equal to its record or to another variant of it would only be a duplicate.
    ids_by_row: dict[int, set[str]] = {row: {originals[row]["id"]} for row in variants}
    changes = []
    added: dict[int, list[int]] = {}
    for at, ((row, method), id) in enumerate(zip(origins, new["id"].to_pylist(), strict=True)):
        if id in ids_by_row[row]:
            continue
        ids_by_row[row].add(id)
        added.setdefault(row, []).append(table.num_rows + at)
        changes.append({"id": id, "before": originals[row]["id"], "step": Augment.name, "detail": method})
    # Each variant right behind its record, so that reading order does not depend on how tables were cut.
    order = [index for row in range(table.num_rows) for index in (row, *added.get(row, []))]
    combined = pa.concat_tables([_assign_groups(table, sorted(added)), new]).take(pa.array(order, pa.int64()))
    return Outcome(combined, REJECTED.empty_table(), pa.Table.from_pylist(changes, schema=CHANGED))


def _assign_groups(table: pa.Table, rows: list[int]) -> pa.Table:
    """Puts every row with variants in a group: its own id, if it has none."""
    has_variants = [False] * table.num_rows
    for row in rows:
        has_variants[row] = True
    alone = pa.compute.and_(pa.array(has_variants), pa.compute.is_null(table["group"]))
    groups = pa.compute.if_else(alone, table["id"], table["group"])
    return table.set_column(table.schema.get_field_index("group"), "group", groups)


def _varied_text(record: Mapping[str, Any]) -> str | None:
    """Returns the text of a record that can be varied, or None."""
    if record["prompt"] is None:
        return None if record["text"] is None else str(record["text"])
    last = record["prompt"][-1]
    return str(last["content"]) if last["role"] == "user" else None


def _with_text(record: Mapping[str, Any], text: str) -> dict[str, Any]:
    if record["prompt"] is None:
        return {"text": text}
    return {"prompt": [*record["prompt"][:-1], {"role": "user", "content": text}]}
