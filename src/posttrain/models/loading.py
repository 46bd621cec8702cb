"""Loads configs, tokenizers and weights, and tells faults of a model's files from failures of the machine.

A fault of the files is the user's: a `UserError` that names the file or tensor. Memory that runs out is a `WorkError`,
and what is neither, such as a defect in a library, stays the exception it is.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain import __version__
from posttrain.models.weight_files import INDEX, WEIGHTS, TensorHeader, read_headers, weight_files
from posttrain.store.errors import UserError, WorkError
from posttrain.store.files import to_storage_error
from posttrain.store.message import Message
from posttrain.store.user_cache import read_user_cache, write_user_cache

# No torch at import: mistakes in a call are reported before it is loaded.
if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("posttrain")

_MEMORY_MESSAGES = (
    *("can't allocate memory", "not enough memory"),  # of torch's CPU allocator, on POSIX systems and elsewhere
    *("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
    "std::bad_alloc",  # of any C++ library
)
"""Parts of the texts of RuntimeErrors, which have no class of their own."""

GENERATION_CONFIG = "generation_config.json"

_CACHE = "architectures"

_WHOLE = "use undamaged weights, or correct config.json"

_BARE_ERRORS = (LookupError, TypeError, AttributeError, ArithmeticError)

# Codes of a missing file; others come from the machine: a failing disk, no more handles.
_MISSING = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)

# No model has more, and each takes a millisecond to set up.
_MAX_LAYERS = 2000

# Buffers that older checkpoints hold and the models of today compute.
_COMPUTED_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|attention\.(masked_)?bias|position_ids)$")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory ran out: an accelerator's, a library's, the system's or Python's."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MEMORY_MESSAGES)


@contextmanager
def model_file_errors(what: str, where: str, faults: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Turns the errors of a library that reads a model's files into one line.

    Args:
        what: the beginning of the line.
        where: the file or folder.
        faults: exceptions that a fault of the files raises. Parsers of configs and tokenizers raise any; where weights
            are loaded after all checks, few are left.

    Raises:
        UserError: the files are at fault, or a package that they need is missing.
        WorkError: memory ran out.
    """
    try:
        yield
    except (UserError, WorkError):
        raise
    except ImportError as error:
        fix = "install the package that it names"
        raise UserError(f"{what}: {first_line(error)}", where=where, fix=fix) from None
    except Exception as error:
        if is_out_of_memory(error):
            raise WorkError(f"{where}: out of memory while the model is loaded") from None
        if isinstance(error, OSError):
            if refusal := to_storage_error(error, Path(where)):
                raise refusal from error
            if error.errno not in _MISSING:
                raise
        # `OSError` is also what transformers raises for a folder without the file that it looks for.
        if not isinstance(error, (*faults, OSError)):
            raise
        raise UserError(f"{what}: {first_line(error)}", where=where) from None


def load_config(source: str, what: str = "no config can be read", **options: Any) -> Any:
    """Loads the transformers config of a folder or Hub id.

    Args:
        what: the beginning of the error.
        options: of ``from_pretrained``.

    Raises:
        UserError: there is none, its values are impossible, or transformers does not know the family.
    """
    from transformers import AutoConfig

    with model_file_errors(what, source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
        text = config.get_text_config()
        layers = getattr(text, "num_hidden_layers", None)
        if isinstance(layers, int) and not 0 < layers <= _MAX_LAYERS:
            raise UserError(f"{what}: num_hidden_layers is {layers}, not 1 to {_MAX_LAYERS}", where=source)
    return config


def load_tokenizer(source: str, what: str = "no tokenizer can be read", **options: Any) -> Any:
    """Loads the tokenizer of a folder or Hub id; arguments are as in `load_config`.

    Raises:
        UserError: there is none, or its files are damaged.
    """
    from transformers import AutoTokenizer

    # Broad: the library in Rust below raises bare `Exception`s.
    with model_file_errors(what, source):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)


def load_generation_config(source: str) -> Any | None:
    """Loads the generation config of a folder or Hub id; None if it has none.

    Raises:
        UserError: it is damaged, or its stop tokens are not numbers of tokens.
    """
    from transformers import GenerationConfig

    if Path(source).is_dir() and not (Path(source) / GENERATION_CONFIG).is_file():
        return None
    # transformers takes a damaged one for a missing one, and the model would not stop where it should.
    with model_file_errors(f"{GENERATION_CONFIG} cannot be read", source):
        try:
            config = GenerationConfig.from_pretrained(source)
        except OSError as error:
            if Path(source).is_dir() or error.errno not in _MISSING:
                raise
            return None
    stops = config.eos_token_id
    for token in stops if isinstance(stops, list) else [stops]:
        if token is not None and (type(token) is not int or token < 0):
            raise UserError(
                f"{GENERATION_CONFIG} has the stop token {token!r}, which is not a token's number", where=source
            )
    return config


def load_weights(
    kind: Any, folder: Path, dtype: torch.dtype, what: str, *, unused: str | None = None, optional: str | None = None
) -> Any:
    """Loads a model from a folder with safetensors weights, and checks that each tensor is there, used and finite.

    Args:
        kind: one of transformers' ``AutoModel...`` classes.
        dtype: dtype of the weights.
        what: the beginning of errors, such as ``no causal language model``.
        unused: pattern of tensors in the files that the model need not use, searched in their names.
        optional: pattern of tensors that may be missing.

    Raises:
        UserError: the folder holds no such model.
        WorkError: memory ran out.
    """
    from safetensors import SafetensorError

    headers = read_headers(folder)
    config = load_config(str(folder), what)
    _check_shapes(_shapes(kind, config, folder, what), headers)
    load_generation_config(str(folder))
    # Little can be wrong with the files now; other errors are defects, and no user could do anything about them.
    with model_file_errors(what, str(folder), (ValueError, SafetensorError)):
        model, loading = _from_pretrained(
            kind,
            folder,
            config=config,
            dtype=dtype,
            # Pickled weights and a repository's own code could run anything on this machine.
            use_safetensors=True,
            trust_remote_code=False,
        )
    check_loaded(
        loading, str(folder), composite=config.get_text_config() is not config, unused=unused, optional=optional
    )
    check_finite(model, str(folder))
    return model


def check_architecture(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Checks that transformers would load tensors as the model of a config; no number is read.

    It warns where transformers does not know the model. What has passed is not checked again on this machine: to import
    transformers' models takes longer than to merge small ones.

    Args:
        config: content of a ``config.json``.
        shapes: of the tensors in the files, by name.
        where: the beginning of errors.

    Raises:
        UserError: a tensor would be missing, left over or of another shape, or the config is impossible.
    """
    # Not canonical JSON, which refuses the infinite numbers that a config may have.
    content = json.dumps([config, shapes, version("transformers"), __version__], sort_keys=True, default=str)
    key = hashlib.sha256(content.encode()).hexdigest()
    if read_user_cache(_CACHE, key):
        return
    import torch
    import transformers

    known: Any = transformers.CONFIG_MAPPING
    model_type, names = config.get("model_type"), config.get("architectures") or []
    if model_type not in known:
        log.warning("%s: transformers has no models of type %s, and nothing checks that it loads", where, model_type)
        return
    what = "no model has this config"
    with model_file_errors(what, where):
        described = known[model_type].from_dict(dict(config))
        kind: Any = getattr(transformers, names[0], None) if names else None
        kind = kind or transformers.AutoModelForCausalLM
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        _, loading = _from_pretrained(kind, None, config=described, state_dict=tensors, device_map={"": "meta"})
    check_loaded(loading, where, composite=not names and described.get_text_config() is not described)
    write_user_cache(_CACHE, key, True)


def _from_pretrained(kind: Any, folder: Path | None, **options: Any) -> Any:
    """Returns the model and transformers' loading info, which `check_loaded` reads.

    Raises:
        ValueError: tensors that the model holds as one, such as a layer's experts, do not fit each other.
    """
    try:
        # Shapes are compared later: transformers' error does not name the tensor.
        return kind.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except RuntimeError as error:
        if "conversion of the weights" not in str(error):
            raise
        raise ValueError("a layer lacks an expert, or holds one of another shape") from None


def check_loadable(folder: Path) -> None:
    """Checks that the weights in a folder are those of its config; reads their headers alone.

    Raises:
        UserError: as `check_architecture`, or a file is damaged.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    check_architecture(config, {name: header.shape for name, header in read_headers(folder).items()}, str(folder))


def check_loaded(
    loading: Mapping[str, Any],
    where: str,
    *,
    composite: bool = False,
    unused: str | None = None,
    optional: str | None = None,
) -> None:
    """Checks transformers' loading info: no tensor may be missing, of another shape or left over.

    transformers only warns, puts random numbers in place of what is missing and drops what is left over.

    Args:
        composite: whether the model is the text part of a larger one, whose other parts are left over.
        unused, optional: as in `load_weights`.

    Raises:
        UserError: the weights are not those of the config.
    """
    for name, stored, expected in sorted(loading["mismatched_keys"]):
        raise UserError(_other_shape(name, tuple(stored), tuple(expected)), where=where)
    missing = sorted(name for name in loading["missing_keys"] if not (optional and re.search(optional, name)))
    if missing:
        raise UserError(f"{len(missing)} weights are missing, the first is {missing[0]}", where=where, fix=_WHOLE)
    left = [name for name in loading["unexpected_keys"] if not _COMPUTED_BUFFERS.search(name)]
    left = sorted(name for name in left if not (unused and re.search(unused, name)))
    if composite:
        # Of an image encoder and the like.
        left = [name for name in left if re.search(r"(^|\.)(language_model|text_model)\.", name)]
    if left:
        raise UserError(
            Message(
                "{count} tensors have no place in the model that config.json describes, the first is {first}",
                count=len(left),
                first=left[0],
            ),
            where=where,
            fix="remove them, or correct config.json",
        )


def check_finite(model: nn.Module, where: str) -> None:
    """Raises a UserError if a weight or buffer of a loaded model is NaN or infinite."""
    if name := not_finite(model):
        raise _not_finite_error(name, where)


def check_finite_files(folder: Path) -> None:
    """Checks the weights of a folder without loading the model; a folder without weights passes.

    Raises:
        UserError: a file is damaged, or a tensor holds NaN or infinite numbers.
    """
    from safetensors import safe_open

    if not any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        return
    read_headers(folder)
    for file in weight_files(folder):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is not a dictionary
                if not is_finite(tensors.get_tensor(name)):
                    raise _not_finite_error(name, str(file))


def not_finite(model: nn.Module) -> str | None:
    """Returns the name of a weight or persistent buffer that is not finite throughout; None if there is none."""
    seen: set[int] = set()  # a tied head is the embedding
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            if not is_finite(tensor):
                return name
    return None


def is_finite(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor holds neither NaN nor infinite numbers."""
    import torch

    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # The extremes, in one pass without a copy: NaN is the extreme of anything.
    low, high = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _not_finite_error(name: str, where: str) -> UserError:
    return UserError(f"tensor {name} holds NaN or infinite numbers", where=where, fix="use an undamaged model")


def first_line(error: Exception) -> str:
    """Returns the first line of a library's error that is not a mere heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A key alone, or what Python says of a type, tells nobody that a value of the file is wrong.
    if lines and isinstance(error, _BARE_ERRORS):
        lines[0] = f"{type(error).__name__}: {lines[0]}"
    # Headings such as "Validation error for field 'hidden_size':" are followed by the fault.
    line = " ".join(lines[:2]) if lines and lines[0].endswith(":") else lines[0] if lines else type(error).__name__
    return line[:500]


# By the kind of model and the content of config.json: a round loads models of one config many times.
_known_shapes: dict[tuple[Any, bytes], dict[str, tuple[int, ...]]] = {}
_MAX_KNOWN = 8


def _shapes(kind: Any, config: Any, folder: Path, what: str) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of each tensor of the config's model, which is built on the ``meta`` device for that."""
    import torch

    key = kind, (folder / "config.json").read_bytes()
    if key not in _known_shapes:
        with model_file_errors(f"{what} has this config", str(folder)), torch.device("meta"):
            model = kind.from_config(config, trust_remote_code=False)
        if len(_known_shapes) == _MAX_KNOWN:
            _known_shapes.clear()
        _known_shapes[key] = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return _known_shapes[key]


def _check_shapes(shapes: Mapping[str, tuple[int, ...]], headers: Mapping[str, TensorHeader]) -> None:
    # Before anything is allocated: a wrong size in the config would look like too little memory.
    for name, shape in shapes.items():
        header = headers.get(name)
        if header is not None and header.shape != shape:
            raise UserError(_other_shape(name, header.shape, shape), where=str(header.file))


def _other_shape(name: str, stored: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return f"tensor {name} has the shape {list(stored)}, and config.json asks for {list(expected)}"
