"""Finds what two splits share from the records alone, whatever code made the splits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import pyarrow as pa

from posttrain.data.contamination.evaluation_index import EvaluationIndex, index_evaluation
from posttrain.data.records.outcome import locations
from posttrain.data.records.provenance import origin_ids
from posttrain.data.records.texts import input_texts, joined_texts
from posttrain.store.errors import UserError

_TRAIN = "train"
_ROWS_A_CHUNK = 256  # what is made of them fits a processor's cache


@dataclass(frozen=True)
class Leak:
    """Names a record of one split that gives away one of another.

    Attributes:
        kind: ``exact`` (an equal input), ``group``, ``origin`` (one is derived from the other, or both from a third),
            ``near duplicate`` or, by the length of the run, ``13-gram``.
        splits: names of the two.
        places: ``file:line`` of the two records, in the order of the splits.
        detail: description of what is shared.
    """

    kind: str
    splits: tuple[str, str]
    places: tuple[str, str]
    detail: str

    def __str__(self) -> str:
        (first, second), (here, there) = self.splits, self.places
        return f"{here} ({first}) and {there} ({second}): {self.detail}"


def find_leaks(
    tables: Mapping[str, pa.Table], threshold: float | None = 0.8, ngram: int | None = 13, *, group: bool = True
) -> list[Leak]:
    """Finds every record that shares something with a record of another split, and the first or closest such one.

    The check reads nothing but the records: inputs are compared by identity, by exact Jaccard
    similarity of their character 5-grams, and groups by name. Between ``train`` and every other split shared runs of
    words count too, by the rule of `posttrain.data.contamination.decontaminate.Decontaminate`: those in more than 10
    held-out records are the wording of the task. Of several things that two records share, the first is reported.

    Args:
        tables: RECORD table of each split by its name.
        threshold: Jaccard similarity from which inputs are alike; None: only equal ones are.
        ngram: words in a run; None: runs are not looked for.
        group: whether a shared group is a leak.
    """
    # Training first, so that it is the searched side of every pair.
    order = sorted(tables, key=lambda name: name != _TRAIN)
    leaks = []
    for first, second in combinations(order, 2):
        # Two held-out splits may share wording; no model learns from it.
        ngram_of_pair = ngram if first == _TRAIN else None
        # Containment is left to the step: a long training text may well quote a short test input.
        index = index_evaluation(tables[second], ngram=ngram_of_pair, threshold=threshold, contained=None)
        families = {family: row for row, family in enumerate(_origin_ids(tables[second]))}
        for start in range(0, tables[first].num_rows, _ROWS_A_CHUNK):
            chunk = tables[first].slice(start, _ROWS_A_CHUNK)
            chunk_locations = locations(chunk)
            reported = set()
            for row, held_out, kind, detail in _shared_with(chunk, index, families, group):
                if (row, held_out) not in reported:
                    reported.add((row, held_out))
                    leaks.append(Leak(kind, (first, second), (chunk_locations[row], index.where[held_out]), detail))
    return leaks


def require_no_leaks(
    tables: Mapping[str, pa.Table],
    version: str,
    threshold: float | None = 0.8,
    ngram: int | None = 13,
    *,
    group: bool = True,
    fix: str = "the step `decontaminate` takes such records from training",
) -> None:
    """Raises a UserError if a split is empty or one gives another away.

    Args:
        version: what errors call the records.
        fix: advice in the error about a leak.

    Raises:
        UserError: an empty split, or a leak: how many there are, and the first.
    """
    for name, table in tables.items():
        if not table.num_rows:
            raise UserError(f"the split `{name}` is empty", where=version, fix="give it a share, or more records")
    leaks = find_leaks(tables, threshold, ngram, group=group)
    if leaks:
        (leaking, other), first = leaks[0].splits, leaks[0]
        count = len({leak.places[0] for leak in leaks if leak.splits == first.splits})
        records = "1 record" if count == 1 else f"{count:,} records"
        raise UserError(f"{records} of {leaking} give {other} away, the first: {first}", where=version, fix=fix)


def _origin_ids(table: pa.Table) -> list[str]:
    """Id of the record that each row was derived from; its own if there is none."""
    origins = origin_ids(table).to_pylist()
    return [origin or id for origin, id in zip(origins, table["id"].to_pylist(), strict=True)]


def _shared_with(
    chunk: pa.Table, index: EvaluationIndex, families: Mapping[str, int], group: bool
) -> Iterator[tuple[int, int, str, str]]:
    """Yields what rows share with the index's records: row, record, kind and detail."""
    for row, identity in enumerate(chunk["input_id"].to_pylist()):
        if identity in index.inputs:
            yield row, index.inputs[identity][0], "exact", "the same input"
    if group:
        for row, name in enumerate(chunk["group"].to_pylist()):
            if name is not None and name in index.groups:
                yield row, index.groups[name], "group", f"both of group `{name}`"
    for row, family in enumerate(_origin_ids(chunk)):
        if family in families:
            yield row, families[family], "origin", "one is derived from the other, or both from a third"
    inputs, texts = input_texts(chunk), joined_texts(chunk)
    if index.input_index is not None:
        for row, (other, similarity) in index.input_index.search(inputs, texts, []).similar.items():
            yield row, other, "near duplicate", f"inputs of similarity {similarity:.2f}"
    if index.word_index is not None:
        for row, overlap in index.word_index.search(inputs, texts, []).items():
            kind = f"{index.word_index.ngram}-gram"
            yield row, overlap.other, kind, "the same words" if overlap.whole else f"{kind}s in both: {overlap.shared}"
