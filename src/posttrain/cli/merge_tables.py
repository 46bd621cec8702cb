"""Tables that ``posttrain merge`` prints: a plan, and what an adapter keeps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.cli.output import print_json, print_line, print_table
from posttrain.store.message import counted


def print_plan(description: dict[str, Any], json: bool) -> None:
    """Prints what a merge will do, as `posttrain.merge.api.describe` has it."""
    if json:
        print_json(description)
        return
    if importances := description.get("importance"):
        rows = [
            [number, *(f"{mean:.4f} ({low:.4f} to {high:.4f})" for mean, low, high in layers)]
            for number, layers in enumerate(zip(*(model["layers"] for model in importances), strict=True))
        ]
        names = [f"importance in {Path(model['model']).name}" for model in importances]
        print_table("", ["layer", *names], rows)
    tensors = description["tensors"].values()
    methods: dict[str, int] = {}
    adapter = any("adapter" in tensor for tensor in tensors)
    for tensor in tensors:
        values = tensor["options"] | tensor.get("adapter", {})
        options = ", ".join(f"{name} {_short(value)}" for name, value in values.items())
        line = f"{tensor['method']}: {options}" if options else tensor["method"]
        methods[line] = methods.get(line, 0) + 1
    print_table("", ["tensors", "method"], [[count, line] for line, count in methods.items()])
    print_line(
        f"{counted(len(tensors), 'tensor')} of {counted(len(description['models']), 'model')}: reads "
        f"{description['bytes_read'] / 1e9:.2f} GB, writes {'at most ' if adapter else ''}"
        f"{description['bytes'] / 1e9:.2f} GB, "
        + (
            f"in about {description['estimated_seconds']:g} s"
            if "estimated_seconds" in description
            else "after the statistics of the models on their data"
        )
    )


def print_adapter(adapter: Mapping[str, Any]) -> None:
    """Prints what an adapter keeps: by the kind of matrix, over all layers, and overall."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for module, matrix in adapter["matrices"].items():
        kinds.setdefault(module.rpartition(".")[2], []).append(matrix)
    rows = []
    for kind, matrices in kinds.items():
        ranks = sorted(matrix["rank"] for matrix in matrices)
        energies = sorted(matrix["energy"] for matrix in matrices)
        errors = sorted(matrix["relative_error"] for matrix in matrices)
        rows.append([kind, len(matrices), _span(ranks, "d"), _span(energies, ".4f"), _span(errors, ".3g")])
    print_table("", ["matrix", "layers", "rank", "energy", "relative error"], rows)
    print_line(
        f"energy {adapter['energy']:.4f}, relative error {adapter['relative_error']:.3g} overall, "
        f"{adapter['parameters']:,} parameters; {counted(adapter['unchanged'], 'tensor')} unchanged, "
        f"{len(adapter['saved_whole'])} saved whole, {len(adapter['dropped'])} dropped"
    )


def _span(values: Sequence[float], format: str) -> str:
    low, high = f"{values[0]:{format}}", f"{values[-1]:{format}}"
    return low if low == high else f"{low} to {high}"


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_short(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
