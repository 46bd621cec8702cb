"""What customers say: the phrases of ``phrases.yaml``, and a message made of them."""

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import yaml

from posttrain.demo.grammar import Phrase, parse

SHORTEST, LONGEST = 8, 25
"""Words in a message."""

_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Phrases:
    openings: list[Phrase]
    closings: list[Phrase]
    contexts: list[Phrase]
    intents: dict[str, list[Phrase]]
    """By intent, from the most to the least frequent."""
    slots: dict[str, list[str]]

    def vocabulary(self) -> set[str]:
        """Every word that a message without typos can hold, case-folded; what has digits aside."""
        groups = [self.openings, self.closings, self.contexts, *self.intents.values()]
        pieces = [piece for group in groups for phrase in group for piece in phrase.texts()]
        values = [value for values in self.slots.values() for value in values]
        plurals = [_plural(value) for value in self.slots["item"]]
        return {word for text in [*pieces, *values, *plurals, "an"] for word in words(_SLOT.sub(" ", text))}


def words(text: str) -> list[str]:
    """The words of a text, case-folded, without punctuation, numbers and mail addresses."""
    return re.findall(r"[a-z]+", re.sub(r"\S*[\d@]\S*", " ", text.casefold()))


@cache
def load_phrases() -> Phrases:
    """The packaged phrases."""
    document = yaml.safe_load(files("posttrain.demo").joinpath("phrases.yaml").read_text("utf-8"))
    return Phrases(
        openings=_lines(document["openings"]),
        closings=_lines(document["closings"]),
        contexts=_lines(document["contexts"]),
        intents={intent: _lines(text) for intent, text in document["intents"].items()},
        slots=document["slots"],
    )


def _lines(text: str) -> list[Phrase]:
    return [parse(line) for line in text.splitlines() if line.strip()]


def compose(phrases: Phrases, intent: str, rng: np.random.Generator) -> str:
    """A message of 8 to 25 words with this intent, without typos."""
    while True:
        cores = phrases.intents[intent]
        core = cores[rng.choice(len(cores), p=_commonness(len(cores)))].expand(rng).strip()
        chance = rng.random(3)
        opening = _draw(phrases.openings, rng).strip() if chance[0] < 0.25 else ""
        context = _draw(phrases.contexts, rng).strip() if chance[1] < 0.25 else ""
        closing = _draw(phrases.closings, rng).strip() if chance[2] < 0.2 else ""
        sentences = [context, core] if rng.random() < 0.6 else [core, context]
        ended = [s if s[-1] in ".?!" else s + "." for s in [*sentences, closing] if s]
        text = _fill(" ".join(filter(None, [opening, *ended])), phrases.slots, rng)
        if SHORTEST <= len(text.split()) <= LONGEST:
            return _style(text, rng)


def _commonness(count: int) -> np.ndarray:
    """Chances of an intent's phrases, float64 [count]: the first are what most people say."""
    weights: np.ndarray = (np.arange(count) + 1.0) ** -1.5
    return np.asarray(weights / weights.sum())


def _draw(group: list[Phrase], rng: np.random.Generator) -> str:
    return group[rng.integers(len(group))].expand(rng)


def _fill(text: str, slots: dict[str, list[str]], rng: np.random.Generator) -> str:
    """Put values into the slots; a slot named twice has one value throughout the message."""
    values = {name: str(rng.choice(choices)) for name, choices in slots.items()}
    values |= {
        "items": _plural(values["item"]),
        "order": f"{rng.choice(['#', 'LF-', ''])}{rng.integers(10_000, 100_000)}",
        "amount": f"£{rng.integers(5, 300)}{rng.choice(['', '.50', '.90', '.99'])}",
        "digits": f"{rng.integers(1000, 10_000)}",
        "code": f"{rng.choice(['SAVE', 'HELLO', 'GIFT', 'LARK'])}{rng.integers(10, 1000)}",
        "email": f"{values['name'].lower()}{rng.integers(1, 100)}@example.com",
    }
    filled = _SLOT.sub(lambda slot: values[slot[1]], text)
    filled = re.sub(r"\ba (?=[aeiou])", "an ", filled)
    return re.sub(r"\s+(?=[,.?!])", "", re.sub(r"\s+", " ", filled))


def _plural(item: str) -> str:
    if item.endswith("shelf"):
        return item[:-1] + "ves"
    return item + ("es" if item.endswith("ch") else "s")


def _style(text: str, rng: np.random.Generator) -> str:
    """How people type: with capitals or all in lower case, with a full stop at the end or without."""
    if rng.random() < 0.2:
        text = text.casefold()
    else:
        text = re.sub(r"(^|[.?!] )([a-z])", lambda start: start[1] + start[2].upper(), text)
    return text.rstrip(".") if rng.random() < 0.3 else text
