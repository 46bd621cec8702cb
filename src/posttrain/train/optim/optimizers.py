"""Build torch's and torchao's optimisers from the config, and save and load their state as plain tensors."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from posttrain.store.errors import UserError
from posttrain.store.installation import install_command
from posttrain.train.optim.config import OptimizerConfig
from posttrain.train.optim.parameter_groups import NamedParameter, parameter_groups

_Factory = Callable[[list[dict[str, Any]], OptimizerConfig], Optimizer]

_OPTIMIZER_KEY = "train.optimizer.name"

_ADAM8BIT_DEVICES = ("cuda", "xpu", "cpu")

_ADAM_KEYS = {"step", "exp_avg", "exp_avg_sq"}

# The state of each optimiser: that of another must not be taken for its own.
_STATE_KEYS = {
    "AdamW": _ADAM_KEYS,
    "AdamW8bit": _ADAM_KEYS,
    "Adafactor": {"step", "row_var", "col_var", "variance"},
    "Muon": {"momentum_buffer"},
    "SGD": set(),
}


def build_optimizer(masters: Sequence[NamedParameter], config: OptimizerConfig) -> Optimizer:
    """Builds the optimiser of some parameters, with a learning rate of zero.

    Before each step, set each group's ``lr``. Gradients must be dense.
    To add an optimiser, name it in ``optim/config.py``, build it here, list its state in ``_STATE_KEYS``, and count its
    bytes in ``memory/weights.py``.

    Adafactor (Shazeer & Stern 2018, arXiv:1804.04235) takes the rate as the limit of its relative step, of which a
    hundredth is usual.

    Args:
        masters: float32 leaf tensors.
        config: the optimiser and its settings.

    Raises:
        UserError: if there is nothing that it could optimise, or it cannot run here.
    """
    if not masters:
        raise UserError("there is no parameter to train", where="train")
    if config.name == "muon":
        return _combined(masters, [_is_hidden_matrix(master) for master in masters], _muon, config)
    if config.name == "adam8bit":
        # Embeddings keep 32 bits, as in Dettmers et al., section 2.3: their gradients vary most.
        return _combined(masters, [master.kind in ("matrix", "head") for master in masters], adam8bit, config)
    make: dict[str, _Factory] = {"adamw": _adamw, "adafactor": _adafactor, "sgd": _sgd}
    return make[config.name](parameter_groups(masters, config.weight_decay), config)


def _combined(
    masters: Sequence[NamedParameter],
    selected: Sequence[bool],
    make: _Factory,
    config: OptimizerConfig,
) -> Optimizer:
    """Combines an optimiser for the chosen matrices with AdamW for the rest."""
    matrices = [master for master, is_chosen in zip(masters, selected, strict=True) if is_chosen]
    rest = [master for master, is_chosen in zip(masters, selected, strict=True) if not is_chosen]
    if not matrices:
        raise UserError(
            f"{config.name} is for weight matrices, and none is trained", where="train.optimizer.name", fix="use adamw"
        )
    parts = [make(parameter_groups(matrices, config.weight_decay), config)]
    if rest:
        # Muon orthogonalises matrices, and its author leaves norms, biases and embeddings to AdamW.
        parts.append(_adamw(parameter_groups(rest, config.weight_decay), config))
    return CombinedOptimizer(parts)


def _is_hidden_matrix(parameter: NamedParameter) -> bool:
    return parameter.kind == "matrix" and parameter.tensor.ndim == 2


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    """Loshchilov & Hutter 2017, arXiv:1711.05101."""
    # Fused: one pass over gradients, moments and weights, where the default makes ten.
    return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, fused=True)


def _adafactor(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    """Shazeer & Stern 2018, arXiv:1804.04235."""
    return torch.optim.Adafactor(groups, lr=0.0)


def _muon(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    """Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/."""
    # Updates as large as AdamW's (Liu et al. 2025, arXiv:2502.16982), so that one learning rate serves both.
    return torch.optim.Muon(groups, lr=0.0, adjust_lr_fn="match_rms_adamw")


def _sgd(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    """Plain stochastic gradient descent, which keeps no state."""
    return torch.optim.SGD(groups, lr=0.0)


class CombinedOptimizer(Optimizer):
    """Combines optimisers of different parameters: one list of groups, one state, one step."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        # The same dictionaries as in the parts, so that there is one truth about each rate.
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps every part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # ends load_state_dict, with fresh groups and state
        self._share()

    def _share(self) -> None:
        # The parts get this object's own groups and state: a rate set here, or a state loaded here, is theirs.
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = list(islice(groups, len(part.param_groups)))
            part.state = self.state


def adam8bit(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    """Builds torchao's AdamW with block-wise 8-bit moments (Dettmers et al. 2021, arXiv:2110.02861).

    Tensors under 4,096 values keep 32 bits.

    Raises:
        UserError: if torchao is not installed, or cannot compile for the tensors' device.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            f"adam8bit needs a package that is not installed ({error})",
            where=_OPTIMIZER_KEY,
            fix=install_command("torchao"),
        ) from None
    device = groups[0]["params"][0][1].device.type
    if device not in _ADAM8BIT_DEVICES:
        raise UserError(f"adam8bit does not run on `{device}`", where=_OPTIMIZER_KEY, fix="use adamw or adafactor")
    if device == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise UserError(
            "adam8bit on a CPU needs a C++ compiler", where=_OPTIMIZER_KEY, fix="install g++, or use adafactor"
        )
    optimizer: Optimizer = AdamW8bit(groups, lr=0.0, betas=config.betas, weight_decay=config.weight_decay)
    optimizer.register_step_pre_hook(_lr_as_tensor)
    return optimizer


def flatten_8bit_moment(moment: Tensor) -> dict[str, Tensor]:
    """Splits an 8-bit moment into plain tensors."""
    names, _ = moment.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(moment, name) for name in names}


def unflatten_8bit_moment(parts: dict[str, Tensor]) -> Tensor:
    """Rebuilds the 8-bit moment of a float32 master from its parts."""
    from torchao.optim.subclass_8bit import OptimState8bit

    # Only the table of a signed moment starts below zero.
    moment: Tensor = OptimState8bit(**parts, signed=bool(parts["qmap"][0] < 0), dtype=torch.float32)
    return moment


def _lr_as_tensor(optimizer: Optimizer, *_: Any) -> None:
    """Converts the learning rate to a tensor: torchao would compile its step again for every new number."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)


class OptimizerState:
    """Saves and loads the state of an optimiser of `build_optimizer` as a flat ``dict[str, Tensor]``.

    Tensors are named ``<key>.<parameter name>`` (``exp_avg.model.norm.weight``), and the tensors inside an 8-bit moment
    ``<key>:<part>.<parameter name>``. Python's numbers become 0-d tensors of 64 bits, which torch's optimisers do not
    use, and numbers again on loading.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
        # By name, not by number: a model with another order of parameters loads right, or says what is missing.
        self._owners = {
            name: (tensor, group, type(part).__name__)
            for part in parts
            for group in part.param_groups
            for name, tensor in zip(group["param_names"], group["params"], strict=True)
        }

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state without a copy; parameters without a gradient so far have none."""
        tensors: dict[str, Tensor] = {}
        for name, (tensor, _, _) in self._owners.items():
            for key, value in self.optimizer.state.get(tensor, {}).items():
                if hasattr(value, "__tensor_flatten__"):
                    tensors |= {f"{key}:{part}.{name}": inner for part, inner in flatten_8bit_moment(value).items()}
                elif isinstance(value, Tensor):
                    tensors[f"{key}.{name}"] = value
                elif value is not None:
                    tensors[f"{key}.{name}"] = torch.tensor(value, dtype=_scalar_dtype(value))
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the optimiser's state by a copy of what `tensors` returned.

        Raises:
            UserError: it is the state of another model or optimiser; nothing is changed.
        """
        loaded: dict[Tensor, dict[str, Any]] = {}
        for full, value in tensors.items():
            whole, _, name = full.partition(".")
            key, _, part = whole.partition(":")
            if name not in self._owners:
                raise _state_mismatch(full, f"`{name}` is not trained here")
            tensor, group, kind = self._owners[name]
            # Moments of another optimiser would load without a word, and lead the first steps astray.
            if key not in _STATE_KEYS[kind] or (part and kind != "AdamW8bit"):
                raise _state_mismatch(full, f"{kind} keeps no `{whole}`")
            if part in ("", "codes") and not _fits_parameter(value, tensor):
                raise _state_mismatch(full, f"{tuple(value.shape)} does not fit a parameter of {tuple(tensor.shape)}")
            state = loaded.setdefault(tensor, {})
            if part:
                state.setdefault(key, {})[part] = value.to(tensor.device, copy=True)
            else:
                # Fused kernels count steps on the device, all others on the CPU.
                device = tensor.device if key != "step" or group.get("fused") else "cpu"
                state[key] = _as_python_number(value.to(device, copy=True))
        for state in loaded.values():
            state.update({key: unflatten_8bit_moment(value) for key, value in state.items() if isinstance(value, dict)})
        # Only here, after the last check, is anything replaced.
        self.optimizer.state.clear()
        self.optimizer.state.update(loaded)


def _state_mismatch(full: str, why: str) -> UserError:
    return UserError(
        f"the saved optimiser state `{full}` is not this optimiser's: {why}",
        fix="resume with the model and optimiser that saved it, or start afresh",
    )


def _fits_parameter(value: Tensor, tensor: Tensor) -> bool:
    """Returns whether a state has the parameter's shape, or a single number for each row, each column or all."""
    return value.ndim == 0 or (
        value.ndim == tensor.ndim
        and all(size in (1, whole) for size, whole in zip(value.shape, tensor.shape, strict=True))
    )


def _scalar_dtype(value: Any) -> torch.dtype | None:
    return torch.float64 if isinstance(value, float) else None


def _as_python_number(value: Tensor) -> Any:
    return value.item() if value.ndim == 0 and value.dtype in (torch.int64, torch.float64, torch.bool) else value
