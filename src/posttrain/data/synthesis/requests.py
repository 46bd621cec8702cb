"""Builds the requests of a synthesis: seed and number decide examples and prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.data.generation.prompts import instructions_prompt, label_inputs_prompt, paraphrase_prompt
from posttrain.data.records.record import Turn
from posttrain.data.synthesis.config import SynthesisConfig
from posttrain.store.errors import UserError

_SEEDS_PER_NEW_EXAMPLE = 4  # one example in so many is a new record: two of eight in the paper
_MOST_LABELS = 1000


@dataclass(frozen=True)
class Seed:
    """Holds a record that others are made from; ``text`` is the content of its last turn, or the plain text."""

    id: str
    text: str
    record: Mapping[str, Any]

    def with_text(self, text: str) -> dict[str, Any]:
        """The columns of a record with ``text`` instead."""
        if self.record["prompt"] is None:
            return {"text": text}
        return {"prompt": [*self.record["prompt"][:-1], {"role": "user", "content": text}]}


@dataclass(frozen=True)
class Request:
    """Holds a prompt, and the columns that records of its reply inherit.

    Attributes:
        shown: the seeds' ids.
        columns: RECORD columns besides the input.
        frame: seed whose earlier turns the new records share; None for none.
    """

    prompt: list[Turn]
    shown: tuple[str, ...]
    columns: Mapping[str, Any]
    frame: Seed | None = None


def select_seeds(records: Sequence[Mapping[str, Any]], config: SynthesisConfig) -> list[Seed]:
    """Selects the records that can be seeds.

    Raises:
        UserError: there are none.
    """
    seeds = []
    for record in records:
        prompt = record["prompt"]
        if prompt is not None and prompt[-1]["role"] == "user":
            if config.method == "instructions" and len(prompt) > 1:
                continue  # new instructions have no earlier turns
            if config.method == "label_inputs" and record["completion"] is None:
                continue
            seeds.append(Seed(record["id"], prompt[-1]["content"], record))
        elif prompt is None and config.method == "paraphrases":
            seeds.append(Seed(record["id"], record["text"], record))
    if not seeds:
        what = {"instructions": "prompts of one user turn", "label_inputs": "prompts with answers"}
        needed = what.get(config.method, "prompts that end with a user turn, or texts")
        raise UserError(f"no seed record fits: `{config.method}` needs {needed}", where="method")
    return seeds


class RequestSchedule:
    """Builds the requests of one synthesis by number."""

    def __init__(self, seeds: Sequence[Seed], config: SynthesisConfig) -> None:
        self._seeds, self._config = seeds, config
        self._by_label: dict[str, list[Seed]] = {}
        if config.method == "label_inputs":
            for seed in seeds:
                self._by_label.setdefault(seed.record["completion"], []).append(seed)
            # Free-text answers are mistaken for labels here, and each would get a request of its own.
            if len(self._by_label) > _MOST_LABELS:
                what = f"the seeds have {len(self._by_label)} different answers, which are hardly labels"
                raise UserError(what, where="method", fix="use instructions or paraphrases")
        self._labels = sorted(self._by_label)
        self._order = np.random.default_rng([config.seed, 0]).permutation(len(seeds))

    def at(self, number: int, new_records: Sequence[Seed]) -> Request:
        """Builds request ``number``, from 0 on, from the seeds and the records made so far."""
        config = self._config
        # A generator a request: a resumed synthesis draws the same examples whatever was drawn before.
        rng = np.random.default_rng([config.seed, 1, number])
        if config.method == "paraphrases":
            seed = self._seeds[self._order[number % len(self._seeds)]]
            columns = {name: seed.record[name] for name in ("completion", "rejected")}
            # A seed and its paraphrases form a group, so a split cannot part them.
            columns["group"] = seed.record["group"] or seed.id
            return Request(paraphrase_prompt(seed.text, config.per_request, config.form), (seed.id,), columns, seed)
        if config.method == "label_inputs":
            label = self._labels[number % len(self._labels)]
            shown = _draw(self._by_label[label], config.examples, rng)
            prompt = label_inputs_prompt(label, [seed.text for seed in shown], config.per_request, config.form)
            columns = {"completion": label}
            return Request(prompt, tuple(seed.id for seed in shown), columns, shown[0])
        own_examples = _draw(new_records, config.examples // _SEEDS_PER_NEW_EXAMPLE, rng)
        shown = _draw(self._seeds, config.examples - len(own_examples), rng)
        mixed = [*shown, *own_examples]
        examples = [mixed[index].text for index in rng.permutation(len(mixed))]
        prompt = instructions_prompt(examples, config.per_request, config.form)
        return Request(prompt, tuple(seed.id for seed in mixed), {})


def _draw(seeds: Sequence[Seed], count: int, rng: np.random.Generator) -> list[Seed]:
    if not seeds:
        return []
    return [seeds[at] for at in rng.choice(len(seeds), min(count, len(seeds)), replace=False).tolist()]
