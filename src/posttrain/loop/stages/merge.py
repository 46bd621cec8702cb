"""Merge: merges the trained candidate with the champion or earlier models; the result is the round's candidate."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.loop.context import RoundContext, task_key
from posttrain.loop.model_registry import find_model
from posttrain.loop.stage import Stage
from posttrain.loop.stages.train import training_dataset
from posttrain.loop.state import RoundState
from posttrain.merge.config import MergeConfig
from posttrain.merge.methods.registry import load_method
from posttrain.merge.recipe import Recipe
from posttrain.store.message import Message
from posttrain.store.section import MAX_INTEGER

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Merge(Stage):
    """Merges models into one.

    Args:
        models: Ids of the candidate and of those that it is merged with.
        weights: One a model; None for methods without.
        base: Id of the model whose weights task vectors are taken from; None for methods without.
        config: The section ``merge``.
        dataset: Id of the training set, on which the models' statistics are computed; None for methods without.
    """

    models: tuple[str, ...]
    weights: tuple[float, ...] | None
    base: str | None
    config: MergeConfig
    dataset: str | None = None
    name = "merge"
    title = Message("merge")
    kind = "model"

    @classmethod
    def execute(cls, context: RoundContext) -> RoundState:
        """Merges the candidate, if the config asks for it; the gate then decides about the merged model."""
        state, config = context.state, context.config.merge
        without = state.without(cls.name)
        if not config.models:
            # Those of an earlier attempt go, as the config has changed since.
            return without
        candidate, base = state.id("candidate"), state.id("base")
        names = {"champion": state.champion, "base": base}
        ids = [names.get(name) or find_model(context.workspace, name) for name in config.models]
        task_vectors = load_method(config.method).task_vectors
        weights = config.weights or [1.0] * (1 + len(ids))
        merged = {candidate: weights[0]}
        for id, weight in zip(ids, weights[1:], strict=True):
            # The base has no task vector; the champion may be the base, as in round 1, or one of the others.
            if id not in merged and not (task_vectors and id == base):
                merged[id] = weight
        if len(merged) == 1:
            log.info("  merge: there is no other model yet")
            return without
        stage = cls(
            tuple(merged),
            tuple(merged.values()) if "weight" in load_method(config.method).options else None,
            base if task_vectors else None,
            config,
            training_dataset(context) if load_method(config.method).statistic else None,
        )
        artifact = context.run(stage)
        others = ", ".join(name for name, id in zip(config.models, ids, strict=True) if id in merged)
        log.info("  merged with %s: %s", others, config.method)
        return replace(state.with_output(cls.name, artifact.id), candidate=artifact.id)

    def inputs(self, context: RoundContext) -> dict[str, str]:
        """Returns the models and the base."""
        models = {f"model {number}": id for number, id in enumerate(self.models)}
        dataset = {"dataset": self.dataset} if self.dataset else {}
        return models | ({"base": self.base} if self.base else {}) | dataset

    def settings(self, context: RoundContext) -> dict[str, Any]:
        """Returns the method with its options."""
        return {
            "method": self.config.method,
            "parameters": self.config.parameters,
            "weights": None if self.weights is None else list(self.weights),
            # As the prompts are shown to the models.
            **(task_key(context.config) if self.dataset else {}),
        }

    def run(self, context: RoundContext, out: Path, scratch: Path) -> dict[str, Any]:
        """Merges; a killed merge begins again."""
        # Here, as `status` lists the stages without torch.
        from posttrain.merge.api import MERGE_FILE, describe, opened_plan, write_merge
        from posttrain.tune.merges.data import draw_examples

        weights = {} if self.weights is None else {"weight": list(self.weights)}
        recipe = Recipe.read(
            {
                "method": self.config.method,
                "base": self.base,
                "models": list(self.models),
                "parameters": self.config.parameters | weights,
                "seed": context.seed(self.name) % MAX_INTEGER,
                "data": self.dataset,
            },
            "merge",
        )
        examples = {}
        if self.dataset:
            records, count = context.dataset(self.dataset).records, recipe.statistics.examples
            examples = {self.dataset: draw_examples(records, count, recipe.seed, "the training set")}
        ids = [*self.models, *([self.base] if self.base else [])]
        folders: dict[tuple[str, str | None], Path] = {(id, None): context.path(id) for id in ids}
        with opened_plan(recipe, folders, examples, context.config.task) as plan:
            run = write_merge(plan, out)
            # Without seconds and memory, as the artifact must be the same bytes whenever it is built.
            (out / MERGE_FILE).write_text(json.dumps(describe(plan, run, measures=False), indent=1), encoding="utf-8")
        return {"merged": list(self.models), "method": self.config.method}
