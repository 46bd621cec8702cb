"""What an optimiser remembers, as plain tensors by parameter name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from posttrain.store.errors import UserError
from posttrain.train.optimizers.adam8bit import join, split
from posttrain.train.optimizers.together import Together

_ADAM = {"step", "exp_avg", "exp_avg_sq"}
# What each optimiser remembers: another's state must not be taken for its own.
_KEYS = {
    "AdamW": _ADAM,
    "AdamW8bit": _ADAM,
    "Adafactor": {"step", "row_var", "col_var", "variance"},
    "Muon": {"momentum_buffer"},
    "SGD": {"momentum_buffer"},
}


class OptimizerState:
    """The state of an optimiser with named parameters, such as ``build`` makes, as a flat ``dict[str, Tensor]``.

    Tensors are named ``<key>.<parameter name>`` (``exp_avg.model.norm.weight``), and the tensors inside an 8-bit moment
    ``<key>:<part>.<parameter name>``. Python's numbers become 0-d tensors of 64 bits, which torch's optimisers do not
    use, and numbers again on loading.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        parts = optimizer.parts if isinstance(optimizer, Together) else [optimizer]
        self._owners = {
            name: (tensor, group, type(part).__name__)
            for part in parts
            for group in part.param_groups
            for name, tensor in zip(group["param_names"], group["params"], strict=True)
        }

    def tensors(self) -> dict[str, Tensor]:
        """The state as it is (no copy); parameters that had no gradient yet have none."""
        found: dict[str, Tensor] = {}
        for name, (tensor, _, _) in self._owners.items():
            for key, value in self.optimizer.state.get(tensor, {}).items():
                if hasattr(value, "__tensor_flatten__"):
                    found |= {f"{key}:{part}.{name}": inner for part, inner in split(value).items()}
                elif isinstance(value, Tensor):
                    found[f"{key}.{name}"] = value
                elif value is not None:
                    found[f"{key}.{name}"] = torch.tensor(value, dtype=_number_type(value))
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over exactly what ``tensors`` gave, by copy, in place of all that the optimiser remembers.

        Raises:
            UserError: if it is the state of another model or optimiser; then nothing is changed.
        """
        loaded: dict[Tensor, dict[str, Any]] = {}
        for full, value in tensors.items():
            whole, _, name = full.partition(".")
            key, _, part = whole.partition(":")
            if name not in self._owners:
                raise _misfit(full, f"`{name}` is not trained here")
            tensor, group, kind = self._owners[name]
            if key not in _KEYS.get(kind, {key}) or (part and kind != "AdamW8bit"):
                raise _misfit(full, f"{kind} keeps no `{whole}`")
            if part in ("", "codes") and not _fits(value, tensor):
                raise _misfit(full, f"{tuple(value.shape)} does not fit a parameter of {tuple(tensor.shape)}")
            state = loaded.setdefault(tensor, {})
            if part:
                state.setdefault(key, {})[part] = value.to(tensor.device, copy=True)
            else:
                # Fused kernels count steps on the device, all others on the CPU.
                device = tensor.device if key != "step" or group.get("fused") else "cpu"
                state[key] = _as_number(value.to(device, copy=True))
        for state in loaded.values():
            state.update({key: join(value) for key, value in state.items() if isinstance(value, dict)})
        self.optimizer.state.clear()
        self.optimizer.state.update(loaded)


def _misfit(full: str, why: str) -> UserError:
    return UserError(
        f"the saved optimiser state `{full}` is not this optimiser's: {why}",
        fix="go on with the model and optimiser that saved it, or start afresh",
    )


def _fits(value: Tensor, tensor: Tensor) -> bool:
    """Whether a state has the parameter's shape, or one number for all of a row, a column or the whole."""
    return value.ndim == 0 or (
        value.ndim == tensor.ndim
        and all(size in (1, whole) for size, whole in zip(value.shape, tensor.shape, strict=True))
    )


def _number_type(value: Any) -> torch.dtype | None:
    return torch.float64 if isinstance(value, float) else None


def _as_number(value: Tensor) -> Any:
    return value.item() if value.ndim == 0 and value.dtype in (torch.int64, torch.float64, torch.bool) else value
