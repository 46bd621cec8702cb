"""Compares the vocabularies of models: a row of an embedding means the same token in all of them, or merging is noise."""

import json
from collections.abc import Sequence
from pathlib import Path

from posttrain.merge.sources import WeightSource
from posttrain.store.errors import UserError, shorten

TOKENIZER = "tokenizer.json"


def check_vocabularies(sources: Sequence[WeightSource]) -> None:
    """Checks that all models have the same tokens at the same rows.

    Raises:
        UserError: two differ; the line names a token.
    """
    files = [(source, source.folder / TOKENIZER) for source in sources]
    present = [(source, file) for source, file in files if file.is_file()]
    if not present:
        return
    first, content = present[0][0], present[0][1].read_bytes()
    reference: dict[str, int] | None = None
    for source, file in present[1:]:
        other = file.read_bytes()
        if other == content:
            continue  # the usual case, without reading megabytes of JSON
        reference = reference or _vocabulary(content, present[0][1])
        vocabulary = _vocabulary(other, file)
        if vocabulary != reference:
            tokens = sorted(vocabulary.items() ^ reference.items(), key=lambda entry: (entry[1], entry[0]))
            token = tokens[0][0]
            raise UserError(
                f"`{source.name}` and `{first.name}` have different vocabularies: the token {shorten(repr(token))} is "
                f"number {vocabulary.get(token, 'none')} and {reference.get(token, 'none')}",
                where="models",
                fix="only models with one vocabulary merge",
            )


def _vocabulary(content: bytes, file: Path) -> dict[str, int]:
    try:
        tokenizer = json.loads(content)
        model = tokenizer["model"]["vocab"]
        # Unigram models hold a list of pairs, whose order numbers the tokens.
        tokens = {entry[0]: number for number, entry in enumerate(model)} if isinstance(model, list) else dict(model)
        return tokens | {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or []}
    except (ValueError, KeyError, TypeError, IndexError):
        raise UserError("is damaged: it holds no vocabulary", where=str(file)) from None
