"""The call of ``posttrain merge``: makes a recipe of models and options."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.cli.workspace import CURRENT_FOLDER, open_store
from posttrain.merge.recipe import AUTO, Recipe
from posttrain.store.amounts import BYTES, read_amount
from posttrain.store.errors import UserError
from posttrain.store.yaml_files import parse_yaml

_RECIPES = (".yaml", ".yml")


def read_bytes(text: str, where: str) -> int:
    """Reads a size such as ``2GiB``, ``500MB`` or ``1e9``.

    Raises:
        UserError: it is not a size.
    """
    amount = read_amount(text, BYTES)
    size = int(amount[0] * BYTES[amount[1] or "B"]) if amount else 0
    if size < 1:
        raise UserError(f"`{text}` is not a size", where=where, fix="write 2GiB or 500MB")
    return size


def read_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Reads the values of ``--set``: options of the method, each as YAML.

    Raises:
        UserError: one is not ``key=value``.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise UserError(f"`{setting}` is not a setting", where="--set", fix="key=value, such as density=0.5")
        values[key] = parse_yaml(text, f"--set {key}")
    return values


def recipe_of_call(
    models: Sequence[str],
    method: str | None,
    base: str | None,
    weights: str | None,
    settings: Mapping[str, Any],
    changes: Mapping[str, Any],
    workspace: Path,
) -> tuple[Recipe, Path]:
    """Returns the recipe of the call, and the folder that its paths are relative to.

    Args:
        models: the models, or one recipe.
        method, base, weights: options that a recipe has itself.
        settings: options of the method.
        changes: further keys of the recipe; those that are None stay as they are.
        workspace: the folder of the workspace whose models may be named.

    Raises:
        UserError: options contradict each other, or are not a recipe.
    """
    parameters = dict(settings)
    changes = {name: value for name, value in changes.items() if value is not None}
    if any(Path(name).suffix in _RECIPES for name in models):
        if len(models) > 1 or any(value is not None for value in (method, base, weights)):
            raise UserError("a recipe names models, method, base and weights itself", where=models[0])
        from posttrain.merge.recipe import read_recipe

        recipe = read_recipe(Path(models[0]))
        values = recipe.model_dump(exclude_unset=True)
        if "statistics" in changes:
            changes["statistics"] = {**values.get("statistics", {}), **changes["statistics"]}
        values |= changes
        values["parameters"] = {**recipe.parameters, **parameters}
        return Recipe.read(_with_workspace_models(values, workspace), models[0]), Path(models[0]).parent
    if weights is not None:
        numbers = AUTO if weights == AUTO else read_numbers(weights, "--weights")
        if weights != AUTO and len(numbers) != len(models):
            raise UserError(
                f"{len(numbers)} weights for {len(models)} models", where="--weights", fix="give one per model"
            )
        parameters["weight"] = numbers
    values = {"method": method or "linear", "base": base, "models": list(models), "parameters": parameters, **changes}
    return Recipe.read(_with_workspace_models(values, workspace), "merge"), CURRENT_FOLDER


def read_data(recipe: Recipe, root: Path) -> Mapping[str, Any]:
    """Reads the records that a recipe names, by their names; see `posttrain.tune.merges.data.read_examples`."""
    if not recipe.data_files():
        return {}
    # Not at the top: it loads the readers of files.
    from posttrain.tune.merges.data import read_examples

    return read_examples(recipe, root)


def absolute_name(name: str) -> str:
    """Returns a file's absolute path; URLs and datasets of the Hub as they are."""
    return name if ":" in name else str(Path(name).absolute())


def read_numbers(text: str, where: str) -> list[Any]:
    """Reads numbers between commas."""
    return [parse_yaml(part, where) for part in text.split(",")]


def _with_workspace_models(values: dict[str, Any], workspace: Path) -> dict[str, Any]:
    """Replaces names of the workspace's models, such as ``champion`` or ``round 2``, by their folders."""
    if not (workspace / ".posttrain" / "format.json").is_file():
        return values
    from posttrain.loop.model_registry import find_model

    with open_store(workspace) as store:

        def folder(name: Any) -> Any:
            if not isinstance(name, str) or Path(name).exists() or "/" in name or "+" in name:
                return name
            try:
                return str(store.artifacts.path(find_model(store, name)).resolve())
            except UserError:
                return name  # `tiny`, or a model that the sources know

        def entry(model: Any) -> Any:
            return model | {"model": folder(model["model"])} if isinstance(model, dict) else folder(model)

        changed = {"base": folder(values.get("base")), "models": [entry(model) for model in values.get("models") or []]}
        return values | {key: value for key, value in changed.items() if value}
