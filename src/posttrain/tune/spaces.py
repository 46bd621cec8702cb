"""Ready entries of spaces for trainings: the usual ranges, by name.

Learning rates have a range of their own with LoRA: in all three searches of BENCHMARKS.md ("Tuning: a real search of 30
minutes") the best rate lay on the upper end of that for all weights. Other ranges serve every method, and all of them
every size of model and data: we have no curves over sizes by which to narrow them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.store.errors import UserError, suggest
from posttrain.tune.parameters import Choice, Derived, Entry, Fixed, Float, Int, read_entry

AUTO = "auto"
"""All that the method and the objective of a training have, but for what only the model knows."""

READY_KEY = "ready"
"""The key of a space that names ready ones."""

_METHOD, _OBJECTIVE, _RATE = "train.method", "train.objective", "train.learning_rate"

_RATES = {"full": Float(1e-6, 1e-3, log=True), "lora": Float(1e-5, 1e-2, log=True)}
"""The range of learning rates, by method."""


@dataclass(frozen=True)
class ReadySpace:
    """Entries by key of a config, and the trainings that they belong to.

    Args:
        entries: the entries.
        key, value: the training must have this value of this key; empty: any training.
        automatic: whether `AUTO` has them.
    """

    entries: Mapping[str, Entry]
    key: str = ""
    value: str = ""
    automatic: bool = True


def _of_objective(name: str, **entries: Entry) -> ReadySpace:
    return ReadySpace({f"{_OBJECTIVE}.{key}": entry for key, entry in entries.items()}, _OBJECTIVE, name)


# Beyond 0.1 only because that is the objectives' default: it would lie on the edge.
_KL = Float(0.001, 0.5, log=True)

READY: Mapping[str, ReadySpace] = {
    "optimizer": ReadySpace(
        {
            _RATE: _RATES["full"],
            "train.schedule.warmup": Float(0.0, 0.1),
            "train.batch_size": Choice((8, 16, 32, 64)),
            "train.optimizer.weight_decay": Float(1e-4, 0.1, log=True),
        }
    ),
    # Not automatic: only the model knows whether it has it.
    "dropout": ReadySpace({"train.noise.dropout": Float(0.0, 0.3)}, automatic=False),
    "lora": ReadySpace(
        {
            "train.lora.rank": Int(4, 64, log=True),
            "train.lora.alpha": Derived("2 * train.lora.rank"),
            "train.lora.dropout": Float(0.0, 0.1),
        },
        _METHOD,
        "lora",
    ),
    **{name: _of_objective(name, beta=_KL) for name in ("dpo", "robust_dpo", "ipo", "hinge", "kto", "cpo")},
    # Those of Meng et al. 2024, arXiv:2405.14734, appendix B; these betas are not KL coefficients.
    "orpo": _of_objective("orpo", beta=Float(0.1, 2.0, log=True)),
    "simpo": _of_objective("simpo", beta=Float(2.0, 10.0, log=True), gamma=Float(0.3, 1.6)),
}
"""The ready spaces, by name."""


def ready(*names: str, method: str = "full", objective: str = "sft") -> dict[str, Any]:
    """Returns the entries of ready spaces, joined, as a space or a part of one.

    Args:
        names: of `READY`, or ``auto`` for those of a training's method and objective.
        method, objective: of the training, for ``auto``; the method also decides the range of learning rates, and is
            ``lora`` where that is among the names.

    Raises:
        UserError: there is no such ready space.
    """
    entries: dict[str, Any] = {}
    for name in names:
        if name == AUTO:
            entries |= expand({READY_KEY: AUTO}, method=method, objective=objective)
        else:
            methods = ("lora",) if "lora" in names else (method,)
            entries |= {key: entry.to_json() for key, entry in _entries(_named(name, "ready"), methods).items()}
    return entries


def expand(
    space: Mapping[str, Any], *, method: str = "full", objective: str = "sft", where: str = "space"
) -> dict[str, Any]:
    """Puts entries in the place of the names of ready spaces; the space's own entries go before them.

    A space that searches the method or the objective has the entries of each value under a condition; a setting that
    several objectives have takes the range that spans theirs.

    Args:
        space: entries by name; under ``ready`` a name of `READY` or ``auto``, or a list of them.
        method, objective: of the training.
        where: the key of the space, named in errors.

    Raises:
        UserError: there is no such ready space, or the training has nothing of what it searches.
    """
    if READY_KEY not in space:
        return dict(space)
    own = {name: entry for name, entry in space.items() if name != READY_KEY}
    names = space[READY_KEY] if isinstance(space[READY_KEY], list) else [space[READY_KEY]]
    if not names:
        raise UserError("names no ready space", where=f"{where}.{READY_KEY}", fix=suggest("", [AUTO, *READY]))
    values = {key: values_of(own, key, value, where) for key, value in ((_METHOD, method), (_OBJECTIVE, objective))}
    entries: dict[str, Entry] = {}
    for name in names:
        if name == AUTO:
            fitting = [part for part in READY.values() if part.automatic and _fits(part, values)]
        else:
            fitting = [_named(name, where)]
        for part in fitting:
            if not _fits(part, values):
                what = f"`{name}` belongs to {part.key}={part.value}, and the training has {values[part.key][0]}"
                raise UserError(what, where=where, fix=f"set {part.key}={part.value}, or leave `{name}` out")
            for key, entry in _entries(part, values[_METHOD]).items():
                if len(values.get(part.key, ())) > 1:
                    entry = replace(entry, when=f"{part.key} == '{part.value}'")  # type: ignore[type-var]
                    entry = _spanning(entries[key], entry) if key in entries else entry
                entries[key] = entry
    return {key: entry.to_json() for key, entry in entries.items()} | own


def _spanning(first: Entry, other: Entry) -> Entry:
    """Returns the range that spans those of two objectives, under the condition of either."""
    assert isinstance(first, Float), "settings of objectives have ranges of numbers"
    assert isinstance(other, Float)
    low, high = min(first.low, other.low), max(first.high, other.high)
    return replace(first, low=low, high=high, when=f"{first.when} or {other.when}")


def values_of(space: Mapping[str, Any], key: str, configured: Any, where: str = "space") -> Sequence[Any]:
    """Returns the values that trials have of a key: those of a choice, a fixed one, or the configured one.

    Raises:
        UserError: the space has something else of the key, such as a range.
    """
    if key not in space:
        return (configured,)
    read = read_entry(space[key], f"{where}.{key}")
    if isinstance(read, Choice):
        return read.values
    if isinstance(read, Fixed):
        return (read.value,)
    raise UserError("is not a choice of names", where=f"{where}.{key}", fix="list the values")


def _named(name: Any, where: str) -> ReadySpace:
    if not isinstance(name, str) or name not in READY:
        raise UserError(f"there is no ready space `{name}`", where=where, fix=suggest(str(name), [AUTO, *READY]))
    return READY[name]


def _entries(part: ReadySpace, methods: Sequence[Any]) -> dict[str, Entry]:
    """Returns the entries of a ready space for trainings with these methods."""
    entries = dict(part.entries)
    if _RATE in entries:
        ranges = [_RATES[method] for method in methods if method in _RATES] or [_RATES["full"]]
        low, high = min(entry.low for entry in ranges), max(entry.high for entry in ranges)
        entries[_RATE] = Float(low, high, log=True)
    return entries


def _fits(part: ReadySpace, values: Mapping[str, Sequence[Any]]) -> bool:
    return not part.key or part.value in values[part.key]
