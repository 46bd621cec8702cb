"""How alike several sampled answers to one prompt are, word by word."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

_WORD = re.compile(r"\w+")


def normalised(answer: str) -> str:
    """As two answers are compared: NFC, case folded, runs of whitespace as one space, none around."""
    return " ".join(unicodedata.normalize("NFC", answer).casefold().split())


def self_consistency(answers: Sequence[str]) -> float:
    """Share of the answers that agree with the most frequent one, between 1/S and 1.

    X. Wang et al., Self-Consistency Improves Chain of Thought Reasoning, ICLR 2023 (arXiv:2203.11171), section 2.

    Args:
        answers: S >= 1 of them, compared as `normalised` gives them.
    """
    return max(Counter(map(normalised, answers)).values()) / len(answers)


def lexical_diversity(answers: Sequence[str]) -> float:
    """One minus the mean ROUGE-1 F1 over all pairs of answers: 0 where all use the same words, 1 where none shares any.

    C.-Y. Lin, ROUGE, 2004 (W04-1013), for n = 1; one minus lexical similarity as L. Kuhn et al., ICLR 2023
    (arXiv:2302.09664) have it with ROUGE-L. Two answers without a word are alike.

    Args:
        answers: S >= 2 of them.
    """
    bags = [Counter(_WORD.findall(normalised(answer))) for answer in answers]
    pairs = list(combinations(bags, 2))
    return 1.0 - sum(_rouge_1(one, other) for one, other in pairs) / len(pairs)


def _rouge_1(one: Counter[str], other: Counter[str]) -> float:
    total = one.total() + other.total()
    return 2 * (one & other).total() / total if total else 1.0
