"""A pass over records: what is known is taken from the cache, the rest is scored chunk by chunk."""

import logging
from collections.abc import Sequence

import pyarrow as pa

from posttrain.select.scores.cache import KEY, ScoreCache
from posttrain.select.scores.group import Asked, Group, ScoringModel
from posttrain.store.hashing import digest
from posttrain.store.progress import task

log = logging.getLogger("posttrain")


def scored(group: Group, model: ScoringModel, records: Sequence[Asked], cache: ScoreCache) -> pa.Table:
    """The scores of one group, a row a record.

    Records that are not known yet are cut into chunks in the order given, and each chunk is kept once it is done. A
    pass that was killed therefore goes on with the chunk it was at, the same one as in an uninterrupted pass: the
    numbers are the same to the last bit. A record whose scores were kept by an earlier pass has the numbers of that
    pass, whatever stood beside it there.

    Args:
        group: what is computed.
        model: which model is asked; it is loaded only if there is something new to score.
        records: N of them; those with the same content are scored once.
        cache: of the scores of earlier passes.
    """
    named = digest(
        {
            "group": group.name,
            "version": group.version,
            "settings": dict(group.settings),
            "task": model.task.model_dump(mode="json"),
        }
    )
    shelf = cache.shelf(model.id, f"{group.name}-{named[:16]}")
    wanted = {one.key: one for one in records}
    # Of each kept chunk only the rows that are asked for stay in memory.
    tables = [_rows(chunk, wanted) for chunk in shelf.read()]
    known = {key for table in tables for key in table[KEY].to_pylist()}
    rest = [one for key, one in wanted.items() if key not in known]
    if known:
        log.info("  %s: %d of %d records were scored before", group.name, len(known), len(wanted))
    with task(f"scoring: {group.name.replace('_', ' ')}", len(rest), "records") as advance:
        for start in range(0, len(rest), group.at_once):
            chunk = rest[start : start + group.at_once]
            keys = pa.array([one.key for one in chunk], pa.string())
            table = group.score(model.lm, chunk).append_column(KEY, keys)
            shelf.write(table)
            tables.append(table)
            advance(len(chunk))
    if not wanted:
        return group.score(model.lm, [])
    whole = pa.concat_tables(tables)
    row_of = {key: row for row, key in enumerate(whole[KEY].to_pylist())}
    rows = pa.array([row_of[one.key] for one in records], pa.int64())
    return whole.take(rows).drop_columns(KEY).combine_chunks()


def _rows(chunk: pa.Table, wanted: dict[str, Asked]) -> pa.Table:
    return chunk.filter(pa.array([key in wanted for key in chunk[KEY].to_pylist()], pa.bool_()))
