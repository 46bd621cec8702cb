"""Answer: in a loop on preferences, samples two answers of the champion to each prompt of the batch."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from posttrain.loop.context import RoundContext, model_key
from posttrain.loop.score_files import chosen_records
from posttrain.loop.stage import Stage
from posttrain.loop.state import RoundState
from posttrain.models.chat import naming_records
from posttrain.models.task import Turns, record_turns
from posttrain.select.scores.passes import record_location
from posttrain.store.errors import DamagedArtifactError
from posttrain.store.message import Message

log = logging.getLogger("posttrain")

ANSWERS = "answers.parquet"
"""One row for each prompt with two different answers: the record's ``id``, and the answers ``a`` and ``b``."""

_TEMPERATURE = 1.0  # DPO's samples are from the model itself: R. Rafailov et al., NeurIPS 2023, section 4

_TOP_P = 0.95

_ATTEMPTS = 4


@dataclass(frozen=True)
class Answer(Stage):
    """Samples two different answers to each prompt of the batch, which people then compare.

    Prompts to which the model gives the same answer each time, or none within `task.max_new_tokens`, have no row.

    Args:
        champion: Id of the model.
        selection: Id of the batch.
        pool: Id of the pool that it is from.
    """

    champion: str
    selection: str
    pool: str
    name = "answer"
    title = Message("answer")
    kind = "answers"

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Samples the answers, unless people are comparing those of this batch already."""
        state = context.state
        if context.config.task.kind != "preference" or state.selection is None or state.queried_pool is None:
            return state
        if state.waits_for is not None and _has_answers(context, state):
            return state
        answers = context.run(cls(state.id("champion"), state.selection, state.queried_pool))
        log.info("  two answers to each of %d prompts", answers.meta["prompts"])
        if answers.meta["unanswered"]:
            log.warning(
                "  %d prompts have no two different answers within task.max_new_tokens, and are left out",
                answers.meta["unanswered"],
            )
        if not answers.meta["prompts"]:
            # Without a batch in the state, or the next run would take it for one that is out.
            return context.update(
                nothing_to_label=Message("two different answers to a prompt: raise task.max_new_tokens, or add inputs"),
                queried_pool=None,
                scores=None,
                selection=None,
            )
        return state.with_output(cls.name, answers.id)

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the champion, the batch and its pool."""
        return {"champion": self.champion, "selection": self.selection, "pool": self.pool}

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the settings by which the model answers."""
        return {"temperature": _TEMPERATURE, "attempts": _ATTEMPTS, **model_key(context)}

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Writes the answers."""
        batch, _ = chosen_records(context, context.artifact(self.selection), context.artifact(self.pool))
        prompts = [record_turns(record) for record in batch.select(["prompt", "text"]).to_pylist()]
        with naming_records(prompts, lambda row: record_location(batch, row)):
            pairs = sample_pairs(context, self.champion, prompts)
        rows = [(id, *pair) for id, pair in zip(batch["id"].to_pylist(), pairs, strict=True) if pair is not None]
        columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
        table = pa.table([pa.array(column, pa.string()) for column in columns], ["id", "a", "b"])
        parquet.write_table(table, out / ANSWERS)
        return {"prompts": len(rows), "unanswered": len(pairs) - len(rows), "selection": self.selection}


def sample_pairs(context: RoundContext, model: str, prompts: list[Turns]) -> list[tuple[str, str] | None]:
    """Samples two different answers to each prompt; None where there are none after several attempts."""
    from posttrain.models.generator import LocalGenerator, Request, Sampling

    generator = LocalGenerator(context.model(model))
    answers: list[list[str]] = [[] for _ in prompts]
    for attempt in range(_ATTEMPTS):
        missing = [row for row, texts in enumerate(answers) if len(texts) < 2]
        if not missing:
            break
        rows = [row for row in missing for _ in range(2)]
        seeds = np.random.SeedSequence(context.seed(f"answer {attempt}")).generate_state(len(rows)).tolist()
        requests = [
            Request(prompts[row], Sampling(temperature=_TEMPERATURE, top_p=_TOP_P, seed=seed))
            for row, seed in zip(rows, seeds, strict=True)
        ]
        for row, answer in zip(rows, generator.generate(requests), strict=True):
            if answer.finished and answer.text not in answers[row]:
                answers[row].append(answer.text)
    return [(texts[0], texts[1]) if len(texts) > 1 else None for texts in answers]


def read_answers(context: RoundContext) -> dict[str, tuple[str, str]] | None:
    """Reads the two answers to each prompt of the batch by the record's id; None in a loop without preferences."""
    if context.config.task.kind != "preference":
        return None
    table = parquet.read_table(context.path(context.state.outputs[Answer.name]) / ANSWERS).to_pydict()
    return {id: (a, b) for id, a, b in zip(table["id"], table["a"], table["b"], strict=True)}


def _has_answers(context: RoundContext, state: RoundState) -> bool:
    id = state.outputs.get(Answer.name)
    try:
        return id is not None and context.artifact(id).meta["selection"] == state.selection
    except DamagedArtifactError:
        return False
