"""The statistics that a plan's methods need of its models' data, and the weights that follow from them."""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from posttrain.merge.methods.base import Statistic
from posttrain.merge.plan import MergePlan, Sources, TensorPlan
from posttrain.merge.recipe import AUTO, ModelEntry, Recipe
from posttrain.merge.statistics import Example
from posttrain.merge.statistics_cache import ModelWithData, StatisticsFile
from posttrain.merge.tensor_reader import TensorInput
from posttrain.merge.vocabulary_view import VocabularyView, is_by_token
from posttrain.models.task import TaskConfig, trained_task
from posttrain.store.errors import UserError

log = logging.getLogger("posttrain")

_UNEQUAL = 10  # times as much Fisher information as the other models have together

Examples = Mapping[str, Sequence[Example]]
"""The records of each file that a recipe names, by its name there."""


def check_data(plan: MergePlan) -> None:
    """Checks that the recipe names data of every model of which a method needs statistics, and that these will fit.

    Raises:
        UserError: it does not, or a model's rows of tokens stand in the order of another vocabulary.
    """
    recipe, data = plan.recipe, _data_of_models(plan.recipe)
    if recipe.scores is not None and len(recipe.scores) != len(_models(plan)):
        count = len(_models(plan))
        raise UserError(f"{len(recipe.scores)} scores for {count} models", where="scores", fix="give one per model")
    if recipe.data_files() and not needs_statistics(plan):
        log.warning("no method here needs statistics of the models: the data is not read")
    for name, statistics in _needed(plan).items():
        if data.get(name) is None and recipe.data is None:
            methods = {tensor.method.name for tensor in plan.tensors if tensor.method and tensor.method.statistic}
            what = min(methods) if methods else f"the weight {AUTO}"
            statistic = "Fisher information" if "fisher" in statistics else "Gram matrices"
            raise UserError(
                f"{what} needs the {statistic} of `{name}`, and no data is given",
                where="data",
                fix="name records of the model's task: --data FILE, or `data` in the recipe",
            )
    for tensor in plan.tensors:
        for entry in tensor.inputs if tensor.method is not None and tensor.method.statistic == "fisher" else ():
            if isinstance(entry.source, VocabularyView) and is_by_token(entry.tensor):
                raise UserError(
                    f"the Fisher information of {entry.tensor} has its rows in the order of another vocabulary",
                    where=entry.source.name,
                    fix="give it another method by a rule below `layers`: {match: 'embed|lm_head', method: linear}",
                )


@contextmanager
def with_statistics(
    plan: MergePlan, sources: Sources, examples: Examples, task: TaskConfig | None = None
) -> Iterator[MergePlan]:
    """Computes the statistics that a plan's methods need, or reads them from the cache, and yields the plan with them.

    Args:
        plan: the plan.
        sources: the models, as they were opened.
        examples: the records that the recipe names.
        task: how prompts are shown to the models; by default as each was trained.

    Raises:
        UserError: a model cannot be loaded, or has no statistics of one of its tensors.
    """
    models = {source.name: source for source in sources.values()}
    files: dict[tuple[str, Statistic], StatisticsFile] = {}
    described: list[dict[str, Any]] = []
    needed_of = _needed(plan)
    data = {name: _data_of_models(plan.recipe).get(name) or plan.recipe.data or "" for name in needed_of}
    assert all(data.values()), "check_data comes before"
    for file_name in data.values():
        if file_name not in examples:
            raise UserError(
                f"the records of `{file_name}` are not given",
                where="data",
                fix="call posttrain.tune.merges.data.merge_on_data, which reads them",
            )
    tasks = [task or trained_task(models[name].tokenizer_folder) or TaskConfig() for name in data]
    records = dict(zip(data, examples_as_trained(examples, list(data.values()), tasks), strict=True))
    with ExitStack() as opened:
        for name, needed in needed_of.items():
            model = ModelWithData(models[name], records[name], plan.recipe)
            for statistic in needed:
                file = files[name, statistic] = StatisticsFile(f"{statistic} of {name}", model.file(statistic))
                opened.callback(file.close)
                described.append({"model": name, "statistic": statistic, "data": data[name], **_public(file.summary)})
        known = replace(
            plan, tensors=[_with_statistics(tensor, files) for tensor in plan.tensors], statistics=described
        )
        if plan.recipe.has_auto_weights:
            known = _with_weights(known)
        _warn_of_plain_means(known.tensors)
        _warn_of_unequal_information(known)
        yield known


def examples_as_trained(
    examples: Mapping[str, Sequence[Example]], names: Sequence[str], tasks: Sequence[TaskConfig]
) -> list[Sequence[Example]]:
    """Returns for each model its records as its task shows them: with the system message and the template.

    Args:
        examples: records by name.
        names: of the records of each model.
        tasks: of each model.

    Returns:
        Records a model; the same list where models share records and the message.
    """
    shown: dict[tuple[str, str], list[Example]] = {}
    result: list[Sequence[Example]] = []
    for name, task in zip(names, tasks, strict=True):
        key = name, json.dumps([task.system, task.full_template])
        if key not in shown:
            shown[key] = [(task.turns(prompt), answer) for prompt, answer in examples[name]]
        result.append(shown[key])
    return result


def needs_statistics(plan: MergePlan) -> bool:
    """Returns whether the plan can run only with statistics of its models."""
    return bool(_needed(plan))


def _with_weights(plan: MergePlan) -> MergePlan:
    """Returns the plan with the weights that ``auto`` stands for."""
    fisher = [entry for entry in plan.statistics if entry["statistic"] == "fisher"]
    order = {name: number for number, name in enumerate(_models(plan))}
    fisher.sort(key=lambda entry: order[entry["model"]])
    # Of a token, geometric mean: the sums of a long and of a short answer would not compare.
    scores = plan.recipe.scores or [math.exp(entry["log_likelihood"] / entry["tokens"]) for entry in fisher]
    weights = auto_weights(scores, [entry["norm"] for entry in fisher])
    for entry, score, weight in zip(fisher, scores, weights, strict=True):
        log.info("weight of %s: %.4f (score %.4f, Fisher norm %.4g)", entry["model"], weight, score, entry["norm"])
    tensors = [
        replace(tensor, options={**tensor.options, "weight": tuple(weights)})
        if tensor.options.get("weight") == AUTO
        else tensor
        for tensor in plan.tensors
    ]
    recipe = plan.recipe.model_copy(update={"parameters": {**plan.recipe.parameters, "weight": weights}})
    return replace(plan, recipe=recipe, tensors=tensors)


def auto_weights(scores: Sequence[float], norms: Sequence[float]) -> list[float]:
    """Returns w_i = s_i f_i / sum_j s_j f_j.

    f_i, the Fisher norm, is the trace of the diagonal Fisher information: the mean squared norm of the gradient of an
    answer's log-likelihood. The `fisher` method weighs each element of a model by its own information; with one
    precision f_i for the whole model, the isotropic Gaussian of the same trace, its formula (Matena and Raffel 2022,
    arXiv:2111.09832, equation 4) becomes sum_i f_i theta_i / sum_i f_i, the weights here for equal scores. The score is
    the trust in the model's task, as their hyperparameters lambda_i are. Two models at 0.85 and 0.90 whose Fisher
    norms stand 2:3 get 0.85 * 2 : 0.90 * 3 = 1.7 : 2.7, which is 0.386 and 0.614.

    Only ratios count: of scores, where twice as much is twice as good, and of norms, which must be of the same kind of
    answers.

    Args:
        scores: s, one per model, 0 or more.
        norms: f, one per model, 0 or more.

    Raises:
        UserError: there are not as many scores as models, or all products are zero.
    """
    if len(scores) != len(norms):
        raise UserError(f"{len(scores)} scores for {len(norms)} models", where="scores", fix="give one per model")
    products = [score * norm for score, norm in zip(scores, norms, strict=True)]
    total = sum(products)
    if total == 0:
        raise UserError("every score or Fisher norm is zero", where="weights", fix="give the weights as numbers")
    return [product / total for product in products]


def _needed(plan: MergePlan) -> dict[str, list[Statistic]]:
    """Returns the statistics that are needed, by the model's name."""
    needed: dict[str, dict[Statistic, None]] = {}
    if plan.recipe.has_auto_weights:
        needed = {name: {"fisher": None} for name in _models(plan)}
    for tensor in plan.tensors:
        if tensor.method is not None and tensor.method.statistic is not None:
            for entry in tensor.inputs:
                needed.setdefault(entry.source.name, {})[tensor.method.statistic] = None
    return {name: list(statistics) for name, statistics in needed.items()}


def _models(plan: MergePlan) -> list[str]:
    return [entry.source.name for entry in plan.tensors[0].inputs]


def _data_of_models(recipe: Recipe) -> dict[str, str | None]:
    return {_name(entry): entry.data for entry in recipe.entries()}


def _name(entry: ModelEntry) -> str:
    return entry.model if entry.adapter is None else f"{entry.model}+{entry.adapter}"


def _with_statistics(tensor: TensorPlan, files: Mapping[tuple[str, Statistic], StatisticsFile]) -> TensorPlan:
    if tensor.method is None or tensor.method.statistic is None:
        return tensor
    entries, norms = [], []
    for entry in tensor.inputs:
        file = files[entry.source.name, tensor.method.statistic]
        if entry.tensor not in file.shapes():
            if tensor.method.statistic == "fisher" and entry.tensor not in file.summary["buffers"]:
                raise UserError(
                    f"the model that was loaded has no parameter {entry.tensor}, so that its Fisher information is "
                    "not known",
                    where=entry.source.name,
                    fix="give such tensors another method by a rule below `layers`",
                )
            return tensor
        entries.append(TensorInput(file, entry.tensor))
        norms.append(file.summary["norm"])
    return replace(tensor, statistics=tuple(entries), norms=tuple(norms))


def _warn_of_unequal_information(plan: MergePlan) -> None:
    """Warns where one model has so much more Fisher information that it decides alone."""
    merged = [t for t in plan.tensors if t.norms and t.method is not None and t.method.statistic == "fisher"]
    if not merged or merged[0].options.get("normalize"):
        return
    shares = merged[0].options.get("weight", [1.0] * len(merged[0].norms))
    weights = [weight * norm for weight, norm in zip(shares, merged[0].norms, strict=True)]
    most = max(range(len(weights)), key=weights.__getitem__)
    others = sum(weights) - weights[most]
    if weights[most] > _UNEQUAL * others > 0:
        log.warning(
            "%s has %.0f times the Fisher information of the others, and decides nearly alone; --set normalize=true",
            merged[0].inputs[most].source.name,
            weights[most] / others,
        )


def _warn_of_plain_means(tensors: Sequence[TensorPlan]) -> None:
    """Warns of matrices that a method averages, as no layer is known that they are of."""
    merged = [t for t in tensors if t.method is not None and t.method.statistic == "gram"]
    plain = [t.name for t in merged if not t.statistics and len(t.shape) > 1 and not is_by_token(t.name)]
    if plain:
        log.warning(
            "%d matrices become the plain mean, as their inputs are not known; the first: %s", len(plain), plain[0]
        )


def _public(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {name: summary[name] for name in ("examples", "tokens", "log_likelihood", "norm", "sha256")}
