"""The table of where the time of a step went, in words, with advice where something is off."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from posttrain.train.watch.attribution import Parts

_FORWARD = {
    "embedding": ("forward: embedding", "looking up the vector of each token"),
    "attention": ("forward: attention", "tokens taking in what stands before them"),
    "linear": ("forward: linear layers", "the large matrix products of each layer"),
    "rest": ("forward: norms, activations", "what lies between the matrix products"),
}
_BACKWARD = {
    "head": ("backward: output head", "how the last vectors should change"),
    "linear": ("backward: linear layers", "how weights and inputs should change, twice the forward work"),
    "attention": ("backward: attention", "the same for attention"),
    "rest": ("backward: norms, activations", "the same for what lies between"),
    "embedding": ("backward: embedding", "the same for the tokens' vectors"),
    "again": ("backward: computed again", "activations that were not kept, to save memory"),
    "sums": ("gradient sums", "adding up the micro-batches' gradients in float32"),
}
_WHOLE = {
    "data": ("reading data", "waiting for the next batch, and packing it"),
    "head": ("output head and loss", "a score for every word of the vocabulary, and how wrong it was"),
    "clip": ("gradient norm and clipping", "measuring the gradient, and shortening it if it is too long"),
    "optimizer": ("optimiser", "from the gradient to new weights"),
    "checkpoint": ("checkpoint", "copying the state, so that a kill costs little"),
    "watch": ("watching", "looking for faults, and writing the step down"),
}
_ORDER = ("data", "forward", "head", "backward", "clip", "optimizer", "checkpoint", "watch")


@dataclass(frozen=True)
class Where:
    """What was measured.

    Args:
        seconds: of all steps together.
        phases: seconds of each phase of all steps together.
        parts: how ``forward`` and ``backward`` divide.
        steps: how many.
        device: what computed.
    """

    seconds: float
    phases: Mapping[str, float]
    parts: Parts
    steps: int
    device: str


def rows(where: Where) -> list[tuple[str, float, str]]:
    """Name, share of the time and meaning of each thing that took time, in the order of a step; they add up to 1."""
    found = list(_rows(where))
    rest = where.seconds - sum(where.phases.values())
    found.append(("everything else", max(0.0, rest), "Python between the phases"))
    total = sum(took for _, took, _ in found) or 1.0
    return [(name, took / total, meaning) for name, took, meaning in found if took > 0]


def advice(where: Where) -> list[str]:
    """A line for each thing that takes more than it should."""
    share = {name: part for name, part, _ in rows(where)}

    def of(*names: str) -> float:
        return sum(share.get(name, 0.0) for name in names)

    between = of("forward: norms, activations", "backward: norms, activations")
    judged = (
        (of("reading data"), 0.01, "waiting for data", "raise train.loader.prefetch or train.loader.workers"),
        (of("optimiser"), 0.20, "the optimiser", "a larger train.batch_size steps it less often"),
        (of("backward: computed again"), 0.15, "computing activations again", "if memory allows, keep more of them"),
        (between, 0.25, "norms and activations", "train.compile=true fuses them"),
        (of("checkpoint"), 0.05, "saving checkpoints", "raise train.checkpoint.every_seconds"),
        (of("watching"), 0.02, "watching", "leave out a slow entry of train.sinks"),
        (of("everything else"), 0.10, "Python between the phases", "raise train.micro_batch_tokens"),
    )
    return [f"{what}: {part:.0%} of a step; {fix}" for part, limit, what, fix in judged if part > limit]


def table(where: Where) -> str:
    """The whole as text."""
    found = rows(where)
    width = max(len(name) for name, _, _ in found)
    a_step = where.seconds / where.steps
    steps = f"{where.steps} steps" if where.steps > 1 else "one step"
    lines = [f"Where the time of a step went ({steps} of {a_step:.3g} s on {where.device}, profiler included)", ""]
    lines.append(f"{'':{width}}  {'s a step':>8}  share")
    lines += [f"{name:{width}}  {a_step * part:8.4f}  {part:5.1%}  {meaning}" for name, part, meaning in found]
    lines += ["", *(advice(where) or ["Nothing takes more than it should."])]
    return "\n".join(lines) + "\n"


def _rows(where: Where) -> Iterator[tuple[str, float, str]]:
    for phase in (*_ORDER, *(name for name in where.phases if name not in _ORDER)):
        took = where.phases.get(phase, 0.0)
        known = {"forward": _FORWARD, "backward": _BACKWARD}.get(phase)
        if known is None:
            name, meaning = _WHOLE.get(phase, (phase, ""))
            yield name, took, meaning
            continue
        parts = where.parts.get(phase) or {"rest": 1.0}
        for part, (name, meaning) in known.items():
            yield name, took * parts.get(part, 0.0), meaning
