"""From a profiler's events to parts of a model: whose work, forward or backward, each operation was."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

PHASE, PART = "phase: ", "part: "
"""What the names of the ranges begin with that mark a step's phases, and the parts of a model."""

Parts = Mapping[str, Mapping[str, float]]
"""Share of each phase's time by part: embedding, attention, linear, rest, head, again, sums."""

_EVALUATE = "autograd::engine::evaluate_function: "
_BACKWARD = 1  # at::RecordScope
# Where no module tells, as in compiled layers, these words in an operation's name do.
_WORDS = {
    "attention": ("attention", "bmm", "softmax", "rearranged", "repeated"),
    "linear": ("::mm", "addmm", "linear", "matmul"),
    "embedding": ("embedding",),
}


@dataclass(frozen=True)
class _Place:
    """Where an operation belongs; ``part`` is None as long as nothing has told."""

    phase: str | None = None
    part: str | None = None
    backward: bool = False


def parts_of_phases(events: Iterable[Any], *, on_accelerator: bool = False) -> dict[str, dict[str, float]]:
    """How the time of the phases with a model's work in them divides among its parts.

    A forward operation belongs to the innermost marked module around it; a backward one to what its forward operation
    belongs to, which autograd's sequence numbers tell. What a forward module does within the backward pass is done
    ``again``, for activations that were not kept.

    Args:
        events: of torch's profiler, with ranges named ``phase: NAME`` and ``part: NAME``.
        on_accelerator: count the accelerator's time rather than the host's.

    Returns:
        Shares by part, that add up to 1, of the phases ``forward`` and ``backward``; a phase without time is left out.
    """
    on_host = (one for one in events if not one.is_async and one.device_type.name == "CPU")
    ordered = sorted(on_host, key=lambda one: (one.time_range.start, -one.time_range.end))
    places: dict[int, _Place] = {}
    parts: dict[int, str | None] = {}  # of a forward operation, by sequence number; the innermost began last
    for event in ordered:
        place = _placed(event, places, parts)
        places[id(event)] = place
        if event.scope != _BACKWARD and event.sequence_nr >= 0 and not event.name.startswith((PHASE, PART)):
            parts[event.sequence_nr] = "head" if place.phase == "head" else _forward_part(event, place)
    found: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    for event in ordered:
        place = places[id(event)]
        took = event.self_device_time_total if on_accelerator else event.self_cpu_time_total
        phase = "backward" if place.backward else place.phase
        if phase in found and took > 0:
            part = place.part or _by_name(event.name) or "rest"
            found[phase][part] = found[phase].get(part, 0.0) + took
    return {
        phase: {part: took / sum(times.values()) for part, took in times.items()}
        for phase, times in found.items()
        if times
    }


def _placed(event: Any, places: Mapping[int, _Place], parts: Mapping[int, str | None]) -> _Place:
    parent = event.cpu_parent
    outer = places.get(id(parent), _Place()) if parent is not None else _Place()
    name = event.name
    if name.startswith(PHASE):
        phase = name.removeprefix(PHASE)
        return _Place(phase, None, phase == "backward")
    if name.startswith(PART):
        return replace(outer, part="again" if outer.backward else name.removeprefix(PART))
    if name.startswith(_EVALUATE):  # on an accelerator it is in another thread, and in no phase's range
        if "AccumulateGrad" in name:
            return _Place("backward", "sums", True)
        node = next((child for child in event.cpu_children if child.scope == _BACKWARD), None)
        part = parts.get(node.sequence_nr) if node is not None else None
        return _Place("backward", part or _by_name(name), True)
    return outer


def _forward_part(event: Any, place: _Place) -> str | None:
    """The part of a forward operation; one that is done again keeps the name that its operation gives it."""
    return _by_name(event.name) or "rest" if place.part == "again" else place.part or _by_name(event.name)


def _by_name(name: str) -> str | None:
    low = name.lower()
    return next((part for part, words in _WORDS.items() if any(word in low for word in words)), None)
