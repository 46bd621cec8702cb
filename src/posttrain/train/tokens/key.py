"""What a tokenised training set depends on, as one digest."""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.store.hashing import digest, file_digest
from posttrain.train.examples import COLUMNS, Encoder
from posttrain.train.objectives.registry import Shape

FORMAT = 2
"""Raised by hand when other bytes are written for the same records."""


def key(encoder: Encoder, records: pa.Table, max_length: int, shape: Shape) -> str:
    """64 hex characters that two sets share whose tokens are the same."""
    import tokenizers
    import transformers

    task = encoder.task
    return digest(
        {
            "format": FORMAT,
            "versions": [transformers.__version__, tokenizers.__version__],
            "tokenizer": _tokenizer(encoder.chat.tokenizer),
            "template": encoder.chat.tokenizer.chat_template,
            "stop_ids": sorted(encoder.chat.stop_ids),
            "task": {"system": task.system, "template": task.template},
            "labels": task.label_set if shape == "class" else None,
            "max_length": max_length,
            "shape": shape,
            "records": content_digest(records),
        }
    )


def content_digest(records: pa.Table) -> str:
    """Of what decides records' tokens. Ids do not do: two of one id may differ in white space or in their label."""
    names = [name for name in COLUMNS if name in records.column_names]
    found = hashlib.sha256(json.dumps(names).encode())
    for batch in records.select(names).combine_chunks().to_batches(max_chunksize=65_536):
        found.update(batch.serialize())
    return found.hexdigest()


def _tokenizer(tokenizer: Any) -> str:
    """A digest of the tokenizer's vocabulary, rules and special tokens, without what calling it changes."""
    named = [type(tokenizer).__name__, tokenizer.special_tokens_map]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        content: Any = {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}
    else:
        with tempfile.TemporaryDirectory() as folder:
            content = sorted(file_digest(Path(file)) for file in tokenizer.save_pretrained(folder))
    return hashlib.sha256(json.dumps([named, content], sort_keys=True, default=str).encode()).hexdigest()
