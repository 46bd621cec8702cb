"""Composes messages from phrases with alternatives, which ``phrases.yaml`` lists."""

import math
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import yaml

SHORTEST, LONGEST = 8, 25
"""Length of a message in words."""

_SLOT = re.compile(r"\{(\w+)\}")

_TOKEN = re.compile(r"[\[\]|]|[^\[\]|]+")


@dataclass(frozen=True)
class Phrase:
    """A phrase: text and choices, one after another."""

    parts: tuple["str | Choice", ...]

    def expand(self, rng: np.random.Generator) -> str:
        """Returns one of the phrase's texts; choices are uniform, slots stay."""
        return "".join(part if isinstance(part, str) else part.expand(rng) for part in self.parts)

    def count(self) -> int:
        """Counts the expansions of the phrase, slots aside."""
        return math.prod(1 if isinstance(part, str) else part.count() for part in self.parts)

    def texts(self) -> list[str]:
        """Returns every literal piece of text in the phrase, slots included."""
        pieces = []
        for part in self.parts:
            pieces += [part] if isinstance(part, str) else [t for o in part.options for t in o.texts()]
        return pieces


@dataclass(frozen=True)
class Phrases:
    """The phrases and the values of their slots."""

    openings: list[Phrase]
    closings: list[Phrase]
    contexts: list[Phrase]
    intents: dict[str, list[Phrase]]
    """By intent, from the most to the least frequent."""
    slots: dict[str, list[str]]

    def vocabulary(self) -> set[str]:
        """Returns every case-folded word of messages without typos, except words with digits."""
        groups = [self.openings, self.closings, self.contexts, *self.intents.values()]
        pieces = [piece for group in groups for phrase in group for piece in phrase.texts()]
        values = [value for values in self.slots.values() for value in values]
        plurals = [_plural(value) for value in self.slots["item"]]
        return {word for text in [*pieces, *values, *plurals, "an"] for word in words(_SLOT.sub(" ", text))}


def words(text: str) -> list[str]:
    """Splits a text into case-folded words, without punctuation, numbers and mail addresses."""
    return re.findall(r"[a-z]+", re.sub(r"\S*[\d@]\S*", " ", text.casefold()))


@cache
def load_phrases() -> Phrases:
    """Loads the packaged phrases."""
    document = yaml.safe_load(files("posttrain.demo").joinpath("phrases.yaml").read_text("utf-8"))
    return Phrases(
        openings=_lines(document["openings"]),
        closings=_lines(document["closings"]),
        contexts=_lines(document["contexts"]),
        intents={intent: _lines(text) for intent, text in document["intents"].items()},
        slots=document["slots"],
    )


def _lines(text: str) -> list[Phrase]:
    return [parse_phrase(line) for line in text.splitlines() if line.strip()]


def compose(phrases: Phrases, intent: str, rng: np.random.Generator) -> str:
    """Composes a message of 8 to 25 words with this intent, without typos."""
    # Drawn until the length fits; cutting a message would cut its meaning.
    while True:
        cores = phrases.intents[intent]
        core = cores[rng.choice(len(cores), p=_phrase_weights(len(cores)))].expand(rng).strip()
        chance = rng.random(3)
        opening = _draw(phrases.openings, rng).strip() if chance[0] < 0.25 else ""
        context = _draw(phrases.contexts, rng).strip() if chance[1] < 0.25 else ""
        closing = _draw(phrases.closings, rng).strip() if chance[2] < 0.2 else ""
        sentences = [context, core] if rng.random() < 0.6 else [core, context]
        ended = [s if s[-1] in ".?!" else s + "." for s in [*sentences, closing] if s]
        text = _fill_slots(" ".join(filter(None, [opening, *ended])), phrases.slots, rng)
        if SHORTEST <= len(text.split()) <= LONGEST:
            return _vary_style(text, rng)


def _phrase_weights(count: int) -> np.ndarray:
    """Returns sampling probabilities of an intent's phrases, float64 [count], the common ones first."""
    weights: np.ndarray = (np.arange(count) + 1.0) ** -1.5
    return np.asarray(weights / weights.sum())


def _draw(group: list[Phrase], rng: np.random.Generator) -> str:
    return group[rng.integers(len(group))].expand(rng)


def _fill_slots(text: str, slots: dict[str, list[str]], rng: np.random.Generator) -> str:
    """Fills the slots; a slot named twice gets one value throughout the message."""
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
    # Articles and spaces after the slots are filled: only then the next letter is known.
    filled = re.sub(r"\ba (?=[aeiou])", "an ", filled)
    return re.sub(r"\s+(?=[,.?!])", "", re.sub(r"\s+", " ", filled))


def _plural(item: str) -> str:
    if item.endswith("shelf"):
        return item[:-1] + "ves"
    return item + ("es" if item.endswith("ch") else "s")


def _vary_style(text: str, rng: np.random.Generator) -> str:
    """Varies capitals and the final full stop, as people type."""
    if rng.random() < 0.2:
        text = text.casefold()
    else:
        text = re.sub(r"(^|[.?!] )([a-z])", lambda start: start[1] + start[2].upper(), text)
    return text.rstrip(".") if rng.random() < 0.3 else text


@dataclass(frozen=True)
class Choice:
    """Alternatives, one of which is taken."""

    options: tuple[Phrase, ...]

    def expand(self, rng: np.random.Generator) -> str:
        return self.options[rng.integers(len(self.options))].expand(rng)

    def count(self) -> int:
        return sum(option.count() for option in self.options)


def parse_phrase(line: str) -> Phrase:
    """Parses one phrase.

    Raises:
        ValueError: a bracket that is not closed, or a ``|`` or ``]`` outside brackets.
    """
    tokens = _TOKEN.findall(line)
    phrase, used = _parse_phrase(tokens, 0)
    if used < len(tokens):
        raise ValueError(f"`{tokens[used]}` outside brackets in: {line}")
    return phrase


def _parse_phrase(tokens: list[str], at: int) -> tuple[Phrase, int]:
    parts: list[str | Choice] = []
    while at < len(tokens) and tokens[at] not in "|]":
        if tokens[at] == "[":
            choice, at = _parse_choice(tokens, at + 1)
            parts.append(choice)
        else:
            parts.append(tokens[at])
            at += 1
    return Phrase(tuple(parts)), at


def _parse_choice(tokens: list[str], at: int) -> tuple[Choice, int]:
    options = []
    while True:
        option, at = _parse_phrase(tokens, at)
        options.append(option)
        if at == len(tokens):
            raise ValueError(f"a bracket is not closed in: {''.join(tokens)}")
        at += 1
        if tokens[at - 1] == "]":
            return Choice(tuple(options)), at
