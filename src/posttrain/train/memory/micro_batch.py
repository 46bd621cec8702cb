"""The size of a micro-batch, as far as memory and FLOPs depend on it."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from posttrain.models.packing import Packed
from posttrain.train.config import TrainConfig


@dataclass(frozen=True)
class MicroBatch:
    """The size of a micro-batch, as far as memory and FLOPs depend on it.

    Args:
        tokens: tokens in its row.
        supervised: places whose next token is supervised.
        pairs: pairs of a token and one that it sees, itself included.
        queries: queries of attention; more than tokens where sequences side by side are padded.
        keys: that attention keeps; of sequences which share a beginning each has its own copy of it.
        scores: pairs that attention computes in a head, those that are masked included.
        longest: keys of the longest sequence.
    """

    tokens: int
    supervised: int
    pairs: int
    queries: int
    keys: int
    scores: int
    longest: int

    @classmethod
    def from_packed(cls, packed: Packed) -> "MicroBatch":
        """Measures a packed micro-batch."""
        queries = copied = pairs = scores = longest = 0
        alone = False
        for group in packed.plan.groups:
            number, width = group.queries.shape
            before = group.before.numel()
            queries += number * width
            pairs += number * width * (width + 1) // 2 + width * before
            scores += number * width * width + width * before
            longest = max(longest, width + before // number)
            if number == 1 and not before:
                alone = True  # its keys are a view, which holds those of the whole row
            else:
                copied += number * width + before
        # Where rows are padded, linear layers are given the padding too.
        tokens = queries if packed.padded else packed.ids.shape[1]
        keys = copied + (queries if alone else 0)
        return cls(tokens, len(packed.targets), pairs, queries, keys, scores, longest)

    @classmethod
    def full(cls, budget: int, config: TrainConfig, longest: int | None = None) -> "MicroBatch":
        """Returns the largest micro-batch of a token budget: the longest sequences, all tokens supervised.

        Args:
            budget: tokens.
            config: limits the length and the number of sequences.
            longest: tokens of the longest sequence where that is known.
        """
        # Records are cut to `max_length`, so none is longer.
        length = min(longest or config.max_length, config.max_length)
        unit = length * (2 if config.spec.shape == "pair" else 1)
        tokens = max(unit, min(budget, unit * config.batch_size))
        # A causal model's token t of a sequence sees t + 1 tokens: (length + 1) / 2 on average.
        return cls(tokens, tokens, tokens * (length + 1) // 2, tokens, tokens, tokens * length, length)


def elementwise_max(batches: Iterable[MicroBatch]) -> MicroBatch:
    """Returns the elementwise maximum of several micro-batches' sizes."""
    return MicroBatch(*(max(values) for values in zip(*map(astuple, batches), strict=True)))
