"""One-shot search of LoRA's ranks: a supernet is trained once, and each trial measures one of its sub-networks."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from posttrain.models.language_model import LanguageModel, load_language_model, save_language_model
from posttrain.models.precision import choose_precision
from posttrain.models.sources import TINY_MODEL
from posttrain.store.errors import UserError
from posttrain.store.files import remove_tree, sync_tree
from posttrain.train.lora import merge_adapter, set_base_model
from posttrain.train.standalone import CONFIG, SUMMARY, TrainJobConfig, train_standalone
from posttrain.train.supernet import Supernet, add_subnetwork
from posttrain.tune.context import Infeasible, TrialContext
from posttrain.tune.objectives import Measured
from posttrain.tune.parameters import Choice, Int
from posttrain.tune.schedulers.registry import make_scheduler
from posttrain.tune.space import Settings, Space
from posttrain.tune.trainings.config import TuneConfig
from posttrain.tune.trainings.measured_trial import MeasuredTrial
from posttrain.tune.trainings.settings import RANKS_PREFIX, apply_settings

log = logging.getLogger("posttrain")

SUPERNET, MODEL = "supernet", "model"
"""Folders of a study: the training of the supernet, and the best sub-network."""

_WHERE = "tune.one_shot"


@dataclass(frozen=True, kw_only=True)
class OneShotTrial(MeasuredTrial):
    """The function of a one-shot study: measures the sub-network of a trial's ranks, and trains nothing.

    Args:
        supernet: the config of the supernet's training, as JSON values.
        folder: of the study.
    """

    supernet: Mapping[str, Any]
    folder: Path

    def __call__(self, trial: TrialContext) -> Measured:
        """Returns the value of the sub-network, of several metrics a list.

        Raises:
            Infeasible: no module of it has an adapter, or the model is over a limit.
        """
        config = TrainJobConfig.read(apply_settings(self.base, trial.settings), f"trial {trial.number}")
        costs = self.shape_costs(config.train)
        lm, supernet = _load(self.model, self.folder / SUPERNET, json.dumps(self.supernet))
        if not supernet.has_adapter(config.train.lora.ranks):
            raise Infeasible("no module has an adapter")
        with supernet.active(config.train.lora.ranks):
            self.check_latency(lambda: lm)
            return self.measure(costs, lm)

    def with_model(self, folder: Path) -> "OneShotTrial":
        """Returns the trial with the initial model in a folder, and trains the supernet, or resumes its training."""
        if not (self.folder / SUPERNET / SUMMARY).exists():
            log.info("  trains the supernet: %s", self.folder / SUPERNET)
            config = TrainJobConfig.read(self.supernet, _WHERE)
            # Data and settings are those of the study, which has checked them.
            train_standalone(self.folder / SUPERNET, config, self.records, folder, fork=True)
        _load.cache_clear()  # an earlier study of this process may have had the folder
        return replace(self, model=str(folder))

    def export(self, settings: Settings) -> None:
        """Writes a sub-network as `posttrain train` writes a model: merged in Hugging Face layout, and its adapter."""
        config = TrainJobConfig.read(apply_settings(self.base, settings), _WHERE)
        trained = yaml.safe_load((self.folder / SUPERNET / CONFIG).read_text(encoding="utf-8"))
        dtype = TrainJobConfig.read(trained, str(self.folder / SUPERNET / CONFIG)).train.dtype
        _load.cache_clear()  # one model at a time is in memory
        base = load_language_model(Path(self.model), config.task, dtype)
        lm = add_subnetwork(base, self.folder / SUPERNET / "adapter", config.train.lora)
        count = sum(weight.numel() for weight in lm.model.parameters() if weight.requires_grad)
        out, fresh = self.folder / MODEL, self.folder / f"{MODEL}.part"
        remove_tree(fresh)
        save_language_model(merge_adapter(lm, fresh / "adapter"), fresh)
        source = self.base["model"]
        if source != TINY_MODEL and not source.endswith(".gguf"):
            set_base_model(fresh / "adapter", source)
        sync_tree(fresh)
        remove_tree(out)
        fresh.rename(out)
        log.info("  the best sub-network, with an adapter of %s parameters: %s", f"{count:,}", out)


def one_shot_config(config: TrainJobConfig, tune: TuneConfig, space: Space) -> dict[str, Any]:
    """Returns the config of the supernet's training as JSON values: with the greatest ranks, and those below them.

    Raises:
        UserError: the space has more than ranks of LoRA's modules, or the training or the scheduler do not fit.
    """
    if config.train.method != "lora":
        raise UserError("searches ranks of LoRA, and all weights are trained", where=_WHERE, fix="use method: lora")
    if config.train.prune.is_set:
        what = "exports an adapter, and the pruned model that it is of is not kept"
        raise UserError(what, where=_WHERE, fix="prune in a training of its own, and search from that model")
    if config.train.lora.supernet:
        raise UserError("is what one_shot sets", where="train.lora.supernet", fix="leave it out")
    scheduler = tune.scheduler if isinstance(tune.scheduler, str) else tune.scheduler.get("name")
    if scheduler != "none" or make_scheduler(tune.scheduler).max_resource is not None:
        what = "compares trainings before their end, and the trials of one_shot train nothing"
        raise UserError(what, where="tune.scheduler", fix="leave it out")
    ranks = {}
    for name in space.to_json()["entries"]:
        entry = space.parameters.get(name)
        if not name.startswith(RANKS_PREFIX) or not isinstance(entry, Choice | Int) or entry.when is not None:
            what = "one_shot searches choices of ranks alone, without conditions"
            fix = f"keep {RANKS_PREFIX}PATTERN: [0, 4, 8], put the rest into train, or leave one_shot out"
            raise UserError(what, where=f"tune.space.{name}", fix=fix)
        values = entry.values if isinstance(entry, Choice) else range(entry.low, entry.high + 1)
        ranks[name.removeprefix(RANKS_PREFIX)] = sorted(values)
    largest = {f"{RANKS_PREFIX}{pattern}": values[-1] for pattern, values in ranks.items()}
    changed = apply_settings(config.model_dump(mode="json"), largest)
    changed["train"]["lora"]["supernet"] = ranks
    return TrainJobConfig.read(changed, _WHERE).model_dump(mode="json")


@lru_cache(maxsize=1)
def _load(model: str, folder: Path, values: str) -> tuple[LanguageModel, Supernet]:
    """Loads the model with the supernet's adapter, once a process."""
    config = TrainJobConfig.read(json.loads(values), _WHERE)
    base = load_language_model(Path(model), config.task, choose_precision())
    lm = add_subnetwork(base, folder / "adapter", config.train.lora)
    lm.model.eval()
    return lm, Supernet(lm.model, config.train.lora, config.seed)
