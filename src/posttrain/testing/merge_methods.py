"""The contract of merge methods, as a test class to inherit from, and merging of tensors in memory.

class TestMedian(MergeMethodContract):
    @pytest.fixture
    def method(self):
        return "my_package.methods:median"
"""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from posttrain.merge.engine import run_plan
from posttrain.merge.methods.base import MergeMethod, Statistic
from posttrain.merge.methods.registry import load_method
from posttrain.merge.plan import MergePlan, TensorPlan
from posttrain.merge.recipe import Recipe
from posttrain.merge.sources import WeightSource
from posttrain.merge.tensor_group import TensorGroup
from posttrain.merge.tensor_reader import Arena, TensorInput
from posttrain.models.weight_files import WEIGHTS
from posttrain.store.errors import UserError

Tensors = Mapping[str, Tensor]

_SHARED_MEMORY = Path("/dev/shm")

SHAPES: dict[str, tuple[int, ...]] = {
    "blocks": (300, 512),  # three blocks, the last one shorter
    "matrix": (7, 33),
    "column": (5, 1),
    "row": (1, 50),
    "vector": (19,),
    "kernel": (3, 4, 5),
    "element": (1,),
    "scalar": (),
    "no_rows": (0, 4),
    "no_columns": (3, 0),
}
"""Shapes that a method must cope with."""

_SMALL_SHAPES = {name: shape for name, shape in SHAPES.items() if name != "blocks"}


class MemorySource(WeightSource):
    """A model whose tensors are in memory.

    Args:
        name: the model's name.
        tensors: by name.
    """

    def __init__(self, name: str, tensors: Tensors) -> None:
        self.name, self.folder, self.tensors = name, Path(name), dict(tensors)

    @property
    def norm(self) -> float:
        """The sum of all elements: of Fisher information its trace."""
        return sum(float(tensor.double().sum()) for tensor in self.tensors.values())

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def dtype(self, tensor: str) -> torch.dtype:
        return self.tensors[tensor].dtype

    def read(self, tensor: str, start: int, out: Tensor) -> None:
        out.copy_(self.tensors[tensor].reshape(-1)[start : start + len(out)])


def merge_tensors(
    method: str | MergeMethod,
    models: Sequence[Tensors],
    base: Tensors | None = None,
    *,
    memory: int = 1 << 30,
    workers: int = 1,
    seed: int = 0,
    statistics: Sequence[Tensors] | None = None,
    devices: Sequence[torch.device] | None = (),
    **options: Any,
) -> dict[str, Tensor]:
    """Merges models that are in memory, as `merge` does those of folders.

    Args:
        method: a merge method, or its name.
        models: tensors by name, one mapping a model.
        base: the base model's.
        memory: bytes of weights that are held at once; with 0 every pass reads them again.
        workers: processes that merge tensors side by side.
        seed: the recipe's.
        statistics: for a method that needs them, one mapping a model, by the tensors' names; random ones by default.
        devices: accelerators that merge; None for those that `run_plan` chooses.
        options: the method's, as a recipe has them.

    Returns:
        float32 tensors, by name.
    """
    plan = _plan(method, models, base, seed, options, statistics)
    # In memory where there is such a folder: each merge waits for the disk.
    with TemporaryDirectory(dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None) as folder:
        run_plan(plan, Path(folder), memory, workers, devices=devices)
        return load((Path(folder) / WEIGHTS).read_bytes())


def merge_tensor(
    method: str | MergeMethod,
    models: Sequence[Tensor],
    base: Tensor | None = None,
    *,
    statistics: Sequence[Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """Merges one tensor of several models, as `merge_tensors`."""
    named = [{"weight": tensor} for tensor in models]
    named_base = None if base is None else {"weight": base}
    named_statistics = None if statistics is None else [{"weight": tensor} for tensor in statistics]
    return merge_tensors(method, named, named_base, statistics=named_statistics, **options)["weight"]


def random_models(
    count: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES, seed: int = 0
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Draws models that were trained from one base, and the base.

    The numbers fit into bfloat16, so that a method must give the same for either dtype.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> dict[str, Tensor]:
        return {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    base = {name: tensor.bfloat16().float() for name, tensor in draw(1.0).items()}
    models = [
        {name: (base[name] + tensor).bfloat16().float() for name, tensor in draw(0.3).items()} for _ in range(count)
    ]
    return models, base


def random_statistics(statistic: Statistic, model: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Draws the Fisher information of a model's tensors, or the Gram matrices of its matrices, some of them zero."""
    result = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {model}".encode()))
        if statistic == "fisher":
            values = torch.randn(shape, generator=generator)
            result[name] = values.square() * (values.abs() > 0.5)
        elif len(shape) == 2:
            inputs = torch.randn(2 * shape[1], shape[1], generator=generator)
            inputs[:, ::7] = 0
            result[name] = inputs.T @ inputs
    return result


class MergeMethodContract:
    """Tests what every merge method promises; inherit and define the fixture ``method``, a name or a `MergeMethod`.

    The result is the same to the last bit whatever the memory, the workers and the dtype the weights are stored in;
    each block is merged without the others; the result is finite, also of models that are zero, identical or opposite,
    and of tensors with one element or none; the models stay unchanged; and the method merges the numbers of models that
    it names.

    Attributes:
        identity_options: options with which identical models are merged to that model; None if the method has none.
    """

    identity_options: Mapping[str, Any] | None = {}

    @pytest.fixture
    def options(self) -> Mapping[str, Any]:
        """Returns the options to test the method with; its defaults unless overridden."""
        return {}

    @pytest.fixture
    def spec(self, method: str | MergeMethod) -> MergeMethod:
        """Returns the method."""
        return load_method(method) if isinstance(method, str) else method

    @pytest.fixture
    def count(self, spec: MergeMethod) -> int:
        """Returns the number of models to merge: three, or as many of them as the method merges."""
        low, high = spec.models
        return min(max(low, 3), high or 3)

    def test_every_option_has_a_default_that_it_accepts(self, spec: MergeMethod, count: int) -> None:
        for name, parameter in spec.options.items():
            if parameter.default is not None:
                spec.read_option(name, _widened(parameter.default, count), count, name)
        assert spec.function.__doc__

    def test_memory_workers_and_stored_dtype_do_not_change_a_bit(
        self, spec: MergeMethod, count: int, options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        models, base = random_models(count)
        copies = [{name: tensor.clone() for name, tensor in model.items()} for model in [*models, base]]
        expected = merge_tensors(spec, models, base, **options)
        for dtype in (torch.bfloat16, torch.float64):
            stored = [{name: tensor.to(dtype) for name, tensor in model.items()} for model in models]
            _assert_equal(merge_tensors(spec, stored, base, **options), expected)
        for blocks_read_at_once, workers in ((1, 1), (2, 2)):
            monkeypatch.setattr("posttrain.merge.tensor_reader._READ_BYTES", blocks_read_at_once << 18)
            _assert_equal(merge_tensors(spec, models, base, memory=0, workers=workers, **options), expected)
        for model, copy in zip([*models, base], copies, strict=True):
            _assert_equal(model, copy)

    def test_other_tensors_do_not_count(self, spec: MergeMethod, count: int, options: Mapping[str, Any]) -> None:
        models, base = random_models(count)
        expected = merge_tensors(spec, models, base, **options)
        alone = merge_tensors(spec, [{"matrix": model["matrix"]} for model in models], base, **options)
        assert torch.equal(alone["matrix"], expected["matrix"])

    def test_each_block_is_merged_without_the_others(
        self, spec: MergeMethod, count: int, options: Mapping[str, Any]
    ) -> None:
        models, base = random_models(count)
        plan = _plan(spec, models, base, 0, options)
        expected = merge_tensors(spec, models, base, **options)
        tensor = plan.tensors[0]
        for number in (2, 0, 1):
            group = _group(tensor)
            merge = spec.function(group, **tensor.options)
            block = next(block for block in group.blocks() if block.index == number)
            result = merge(block)
            assert result.dtype == torch.float32
            if block.base is not None:
                result = result + block.base
            assert torch.equal(result, expected[tensor.name][block.start : block.start + len(result)])

    def test_result_is_finite(self, spec: MergeMethod, count: int, options: Mapping[str, Any]) -> None:
        for case in ("random", "base", "identical", "zero", "one zero", "opposite", "tiny", "sparse"):
            models, base = _limits(case, count)
            merged = merge_tensors(spec, models, base, **options)
            assert merged.keys() == _SMALL_SHAPES.keys()
            for name, tensor in merged.items():
                assert tuple(tensor.shape) == _SMALL_SHAPES[name]
                assert torch.isfinite(tensor).all(), f"{name} of {case} models is not finite"

    def test_identical_models_give_that_model(self, spec: MergeMethod, count: int) -> None:
        if self.identity_options is None:
            return
        models, base = _limits("identical", count)
        merged = merge_tensors(spec, models, base, **self.identity_options)
        for name, tensor in merged.items():
            torch.testing.assert_close(tensor, models[0][name], rtol=1e-5, atol=1e-6)

    def test_unchanged_models_give_the_base(self, spec: MergeMethod, count: int, options: Mapping[str, Any]) -> None:
        if spec.task_vectors:
            _, base = random_models(0, _SMALL_SHAPES)
            _assert_equal(merge_tensors(spec, [base] * count, base, **options), base)

    def test_merges_the_numbers_of_models_that_it_names(self, spec: MergeMethod) -> None:
        low, high = spec.models
        assert low >= 1
        for number in {low, high or 5}:
            models, base = random_models(number, {"matrix": (6, 5)})
            spec.check_models(number)
            assert torch.isfinite(merge_tensors(spec, models, base)["matrix"]).all()
        for number in {low - 1, *([high + 1] if high else [])}:
            with pytest.raises(UserError, match="models"):
                spec.check_models(number)


def _plan(
    method: str | MergeMethod,
    models: Sequence[Tensors],
    base: Tensors | None,
    seed: int,
    options: Mapping[str, Any],
    statistics: Sequence[Tensors] | None = None,
) -> MergePlan:
    """Plans a merge of all tensors of the first model into float32."""
    spec = load_method(method) if isinstance(method, str) else method
    spec.check_models(len(models))
    for option in options:
        spec.check_name(option, "options")
    values = {
        name: _widened(parameter.default, len(models))
        for name, parameter in spec.options.items()
        if parameter.default is not None
    }
    values |= {name: spec.read_option(name, value, len(models), name) for name, value in options.items()}
    sources = [MemorySource(f"model {number}", tensors) for number, tensors in enumerate(models)]
    if spec.statistic and statistics is None:
        statistics = [
            random_statistics(spec.statistic, number, source.shapes()) for number, source in enumerate(sources)
        ]
    known = [MemorySource(f"statistics {number}", tensors) for number, tensors in enumerate(statistics or [])]
    base_source = MemorySource("base", base) if base is not None and spec.task_vectors else None
    plans = [
        TensorPlan(
            name,
            tuple(tensor.shape),
            torch.float32,
            tuple(TensorInput(source, name) for source in sources),
            TensorInput(base_source, name) if base_source else None,
            spec,
            values,
            tuple(TensorInput(source, name) for source in known if name in source.tensors),
            tuple(source.norm for source in known if name in source.tensors),
        )
        for name, tensor in models[0].items()
    ]
    recipe = Recipe.read({"models": [source.name for source in sources], "seed": seed}, "recipe")
    everything = [*sources, *([base_source] if base_source else [])]
    return MergePlan(recipe, plans, everything, sources[0], sources[0].folder, sources[0])


def _group(tensor: TensorPlan) -> TensorGroup:
    assert tensor.method is not None
    statistic = tensor.method.statistic
    return TensorGroup(
        tensor.name,
        tensor.inputs,
        tensor.base,
        Arena(0),
        task_vectors=tensor.base is not None,
        fisher=tensor.statistics if statistic == "fisher" else (),
        fisher_norms=tensor.norms,
        grams=tensor.statistics if statistic == "gram" else (),
    )


def _widened(default: Any, models: int) -> Any:
    return default * models if isinstance(default, tuple) and len(default) == 1 else default


def _assert_equal(result: Tensors, expected: Tensors) -> None:
    for name, tensor in expected.items():
        assert torch.equal(result[name], tensor), f"{name} differs"


def _limits(case: str, count: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Returns models that are extreme in one way, and their base."""
    models, base = random_models(count, _SMALL_SHAPES)
    zero = {name: torch.zeros_like(tensor) for name, tensor in base.items()}
    if case == "base":
        models = [base] * count
    elif case == "identical":
        models = [models[0]] * count
    elif case == "zero":
        models, base = [zero] * count, zero
    elif case == "one zero":
        models, base = [zero, *models[1:]], zero
    elif case == "opposite":
        models = [{name: (-1) ** number * tensor for name, tensor in models[0].items()} for number in range(count)]
        base = zero
    elif case == "tiny":
        # The squares are zero in float32, and the numbers are not.
        models = [{name: 1e-30 * tensor for name, tensor in model.items()} for model in models]
        base = zero
    elif case == "sparse":
        models = [{name: tensor.mul((tensor - base[name]) > 0.5) for name, tensor in model.items()} for model in models]
        base = zero
    return models, base
