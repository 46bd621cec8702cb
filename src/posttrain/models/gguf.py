"""Reads GGUF files: their config, their tokenizer, and their weights, written in Hugging Face layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.models.loading import check_finite, check_loaded, load_config, load_tokenizer, model_file_errors


def load_gguf_config(file: Path) -> Any:
    """Loads the transformers config that a file's header describes.

    Raises:
        UserError: the file is damaged, or transformers does not know the family.
    """
    with model_file_errors("no config can be read", str(file)), _fast_reader():
        return load_config(str(file.parent), gguf_file=file.name)


def load_gguf_tokenizer(file: Path) -> Any:
    """Loads the tokenizer of a file.

    Raises:
        UserError: there is none, or it is damaged.
    """
    with model_file_errors("no tokenizer can be read", str(file)), _fast_reader():
        return load_tokenizer(str(file.parent), gguf_file=file.name)


def convert_gguf(file: Path, folder: Path) -> None:
    """Writes the model of a file into a folder, in Hugging Face layout with safetensors weights in bfloat16.

    Raises:
        UserError: the file holds no causal language model, or weights that are not finite.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    arguments = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    # Broad: a damaged file ends the reader in any exception.
    with model_file_errors("this GGUF file holds no causal language model", str(file)), _fast_reader():
        tokenizer = AutoTokenizer.from_pretrained(**arguments)
        result: Any = AutoModelForCausalLM.from_pretrained(
            **arguments,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        model, loading = result
    check_loaded(loading, str(file))
    check_finite(model, str(file))
    # The weights are plain by now, but transformers refuses to save a model whose config says it is quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _fast_reader() -> Iterator[None]:
    """Keeps what transformers would read several times, and the table of names that it would build for each module.

    Its progress bar is left out: one of a command's own stands on the same line.
    """
    import gguf
    import numpy as np
    from transformers import modeling_gguf_pytorch_utils

    class Reader(gguf.GGUFReader):
        """Slices a plain array: numpy runs Python code at each of the million slices of a memmap."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._data = mapped.view(np.ndarray)

    patches: list[tuple[Any, str, Any]] = [
        (gguf, "GGUFReader", cache(Reader)),
        (gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        (modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **options: tensors),
    ]
    originals = [getattr(module, name) for module, name, _ in patches]
    for module, name, replacement in patches:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for (module, name, _), original in zip(patches, originals, strict=True):
            setattr(module, name, original)
