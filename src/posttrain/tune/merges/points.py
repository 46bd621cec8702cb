"""Models on the lines between models, to measure the loss there or what each model needs."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from posttrain.merge.api import planned_merge, write_merge
from posttrain.merge.engine import MEMORY
from posttrain.merge.plan import MergePlan
from posttrain.merge.plan_statistics import examples_as_trained
from posttrain.merge.recipe import Recipe
from posttrain.merge.statistics import Example
from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.likelihood import context_length
from posttrain.models.task import TaskConfig, trained_task
from posttrain.store.errors import UserError
from posttrain.store.paths import locate_path
from posttrain.tune.merges.data import read_examples, with_data


def read_data(recipe: Recipe, files: Sequence[str], root: Path | None = None) -> list[Sequence[Example]]:
    """Reads the records that each model of a recipe is measured on, under the task that it was trained for.

    Args:
        recipe: the recipe; its seed draws as many records as its key ``statistics`` says.
        files: one file for all models, or one a model; paths are relative to the current folder.
        root: the folder that the paths of the models are relative to; the current one by default.

    Returns:
        A list a model, the same list where models share a file and a task.

    Raises:
        UserError: there are neither one file nor as many as models, or a file cannot be used.
    """
    named = with_data(recipe, files)
    examples = read_examples(named, Path())
    folders = [locate_path(root or Path(), entry.adapter or entry.model) for entry in named.models]
    tasks = [trained_task(folder) or TaskConfig() for folder in folders]
    return examples_as_trained(examples, [entry.data or named.data or "" for entry in named.models], tasks)


def encode_examples(lm: LanguageModel, examples: Sequence[Example]) -> list[TokenizedExample]:
    """Tokenises examples as the model is shown them, without those that are longer than its context.

    Raises:
        UserError: all of them are.
    """
    encoded = [lm.encode(prompt, answer) for prompt, answer in examples]
    fitting = [example for example in encoded if len(example.ids) <= context_length(lm)]
    if not fitting:
        raise UserError("no record fits the model's context", where="--data", fix="give shorter records")
    return fitting


class MergePoints:
    """Weighted averages of the models of a recipe, each of which is written, loaded and removed.

    Args:
        plan: a linear merge.
        folder: an empty folder on a disk with space for one model in float32.
        memory: bytes of weights that a merge holds at once.

    Attributes:
        names: of the models.
    """

    def __init__(self, plan: MergePlan, folder: Path, memory: int = MEMORY) -> None:
        self._plan, self._folder, self._memory = plan, folder, memory
        merged = next(tensor for tensor in plan.tensors if tensor.method)
        self.names = [entry.source.name for entry in merged.inputs]

    @contextmanager
    def model(self, weights: Mapping[int, float]) -> Iterator[LanguageModel]:
        """Yields the average, in float32.

        Args:
            weights: by number of the model in the recipe; the others take no part.
        """
        numbers = [number for number, weight in weights.items() if weight]
        tensors = []
        for tensor in self._plan.tensors:
            # Of one model alone its weights are copied, and nothing else is read.
            inputs = tuple(tensor.inputs[number] for number in numbers)
            options = {"weight": tuple(weights[number] for number in numbers), "normalize": True}
            tensors.append(replace(tensor, inputs=inputs, options=options) if tensor.method else tensor)
        target = self._folder / "point"
        target.mkdir()
        try:
            write_merge(replace(self._plan, tensors=tensors), target, self._memory)
            yield load_language_model(target, TaskConfig(), "float32")
        finally:
            shutil.rmtree(target)


@contextmanager
def merge_points(recipe: Recipe, root: Path, parent: Path | None = None, memory: int = MEMORY) -> Iterator[MergePoints]:
    """Opens the models of a recipe, aligned if it says so.

    Args:
        recipe: the recipe; its method does not count.
        root: the folder that its paths are relative to.
        parent: the folder in which models are written; the system's for temporary files by default.
        memory: bytes of weights that a merge holds at once.

    Raises:
        UserError: the models cannot be merged, or the recipe has slices.
    """
    if recipe.slices:
        raise UserError("the models of slices are no whole models", where="slices", fix="name whole models")
    models = [{"model": entry.model, "adapter": entry.adapter} for entry in recipe.models]
    values = {"models": models, "base": recipe.base, "align": recipe.align, "tokenizer": recipe.tokenizer}
    linear = Recipe.read(values | {"method": "linear", "dtype": "float32"}, "merge")
    with planned_merge(linear, root, parent or Path(tempfile.gettempdir())) as (plan, folder):
        yield MergePoints(plan, folder, memory)
