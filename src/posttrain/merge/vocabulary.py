"""Matches the vocabularies of models: a row of an embedding must mean the same token in all of them."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.merge.sources import EMBEDDING, HEAD, WeightSource, block_rows
from posttrain.store.errors import UserError, shorten, suggest

log = logging.getLogger("posttrain")

BASE, UNION = "base", "union"

TOKENIZER = "tokenizer.json"

# In the order of preference; the first that is there is the vocabulary's.
_VOCABULARY_FILES = (TOKENIZER, "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")

# Tensors with a row a token, by the names that the families of transformers have for them.
_EMBEDDINGS = re.compile(r"(?:^|\.)(?:embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight$")
_HEADS = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.(?:weight|bias)$|^output\.weight$")

_LEAST_SHARED = 0.5  # of the tokens; with fewer, most rows would be another model's


@dataclass(frozen=True)
class MatchedVocabularies:
    """Models whose rows mean the same tokens.

    Attributes:
        sources: the models, by the keys that they came under.
        folder: holds the tokenizer of the result.
        owner: the model whose numbers of special tokens the result has.
    """

    sources: Mapping[tuple[str, str | None], WeightSource]
    folder: Path
    owner: WeightSource


def match_vocabularies(
    sources: Mapping[tuple[str, str | None], WeightSource],
    template: tuple[str, str | None],
    tokenizer: str = BASE,
    scratch: Path | None = None,
) -> MatchedVocabularies:
    """Gives the rows of all models the order of one vocabulary.

    Rows are matched by the token's text. A row that a model lacks is the template's, so that it has no part in the
    task vector; a row that the template lacks too is the average of the models that have it. Rows without a token, by
    which embeddings are padded, are matched by number.

    Args:
        sources: the models.
        template: key of the base, or of the first model.
        tokenizer: the result's: ``base`` for the template's, a model's name, or ``union`` for the template's with the
            tokens that were added to the others.
        scratch: an empty folder for the files of a union.

    Raises:
        UserError: a tokenizer is damaged, two models have too little in common, or a union is not possible.
    """
    owner = _owner(sources, template, tokenizer)
    files = {key: _vocabulary_file(source.tokenizer_folder) for key, source in sources.items()}
    rows = {key: _row_count(source) for key, source in sources.items()}
    if None in rows.values() and len(set(rows.values())) > 1:
        return MatchedVocabularies(sources, owner.tokenizer_folder, owner)  # of other tensors: the plan names one
    if _same(list(files.values())) and len(set(rows.values())) == 1:
        if (file := files[template]) is not None:
            _read_vocabulary(file, sources[template])
        return MatchedVocabularies(sources, owner.tokenizer_folder, owner)
    vocabularies = {key: _Vocabulary.read(source, files[key], rows[key]) for key, source in sources.items()}
    if len(set(rows.values())) == 1 and all(v.tokens == vocabularies[template].tokens for v in vocabularies.values()):
        return MatchedVocabularies(sources, owner.tokenizer_folder, owner)
    counts = _checked_counts(vocabularies, template)
    if tokenizer == UNION:
        if scratch is None:
            raise ValueError("a union of tokenizers needs a folder for its files")
        tokens = _unite(vocabularies, template, scratch)
        folder, count = scratch, max(counts[template], 1 + max(tokens.values()))
    else:
        chosen = next(key for key, source in sources.items() if source is owner)
        tokens, folder, count = vocabularies[chosen].tokens, owner.tokenizer_folder, counts[chosen]
    names = _names(tokens, count)
    maps = {key: vocabulary.row_map(tokens, names) for key, vocabulary in vocabularies.items()}
    for key, vocabulary in vocabularies.items():
        vocabulary.check(tokens, maps[key], is_template=key == template)
    order = [template, *(key for key in sources if key != template)]
    _check_rows({key: maps[key] for key in order}, names)
    donors = [(sources[key], maps[key]) for key in order]
    views = {
        key: source if _is_identity(maps[key], counts[key]) else VocabularyView(source, maps[key], donors)
        for key, source in sources.items()
    }
    return MatchedVocabularies(views, folder, owner)


class VocabularyView(WeightSource):
    """A model whose rows of tokens stand in another order.

    Args:
        source: the model.
        rows: int64, for each row of the result the model's own, or -1.
        donors: models with their maps: a row that is -1 is the first one's, or else the average of the others that
            have it.
    """

    def __init__(
        self, source: WeightSource, rows: np.ndarray, donors: Sequence[tuple[WeightSource, np.ndarray]]
    ) -> None:
        self.name, self.folder, self.config = source.name, source.folder, source.config
        self.tokenizer_folder, self.location = source.tokenizer_folder, source.location
        self._source, self._rows, self._donors = source, rows, donors
        missing = rows < 0
        first = donors[0][1]
        used = [bool((missing & (first >= 0)).any())]
        used += [bool((missing & (first < 0) & (other >= 0)).any()) for _, other in donors[1:]]
        self._used = [donor for (donor, _), use in zip(donors, used, strict=True) if use]
        self._averaged = bool((missing & (first < 0)).any())

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        count = len(self._rows)
        return {
            name: (count, *shape[1:]) if _is_by_token(name) else shape for name, shape in self._source.shapes().items()
        }

    def dtype(self, tensor: str) -> torch.dtype:
        own = self._source.dtype(tensor)
        if not _is_by_token(tensor):
            return own
        same = all(donor.dtype(_own_name(donor, tensor)) == own for donor in self._used)
        return own if same and not self._averaged else torch.float32  # rounded once, with the result

    def stored_dtype(self, tensor: str) -> torch.dtype:
        return self._source.stored_dtype(tensor)

    def file(self, tensor: str) -> str:
        return self._source.file(tensor)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        self._source.close()

    def read(self, tensor: str, start: int, out: Tensor) -> None:
        if not _is_by_token(tensor):
            self._source.read(tensor, start, out)
            return
        shape = self._source.shapes()[tensor]
        columns = shape[-1] if len(shape) > 1 else 1
        first, result = start // columns, out.view(-1, columns)
        # Block by block, however much is read at once: an adapter's last bits depend on how many rows are read.
        step = block_rows(columns)
        for begin in range(0, len(result), step):
            part = result[begin : begin + step]
            self._fill(tensor, first + begin, part)

    def _fill(self, tensor: str, start: int, out: Tensor) -> None:
        span = slice(start, start + len(out))
        own = self._rows[span]
        _read_rows(self._source, tensor, own, out)
        missing = own < 0
        if not missing.any():
            return
        template, *others = [(source, rows[span]) for source, rows in self._donors]
        borrowed = np.where(missing, template[1], -1)
        _read_rows(template[0], _own_name(template[0], tensor), borrowed, out)
        orphans = missing & (borrowed < 0)
        if not orphans.any():
            return
        total = torch.zeros(len(out), out.shape[1])
        counts = np.zeros(len(out), np.int64)
        for source, rows in others:
            given = np.where(orphans, rows, -1)
            addend = torch.zeros_like(total)
            _read_rows(source, _own_name(source, tensor), given, addend)
            total += addend
            counts += given >= 0
        at = torch.from_numpy(np.flatnonzero(orphans))
        out[at] = (total[at] / torch.from_numpy(counts)[at, None]).to(out.dtype)


def _read_rows(source: WeightSource, tensor: str, rows: np.ndarray, out: Tensor) -> None:
    """Reads a model's rows into those of ``out`` that are not -1."""
    dtype = source.dtype(tensor)
    for begin, end in _runs(rows):
        target = out[begin:end]
        start = int(rows[begin]) * out.shape[1]
        if dtype == out.dtype:
            source.read(tensor, start, target.reshape(-1))
        else:
            stored = torch.empty(target.numel(), dtype=dtype)
            source.read(tensor, start, stored)
            target.copy_(stored.view_as(target))


def _runs(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the ends of the stretches whose numbers ascend one by one, without those of -1."""
    breaks = np.flatnonzero((np.diff(rows) != 1) | (rows[1:] < 0) | (rows[:-1] < 0)) + 1
    ends = [0, *breaks.tolist(), len(rows)]
    for begin, end in pairwise(ends):
        if end > begin and rows[begin] >= 0:
            yield begin, end


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of one model.

    Attributes:
        tokens: number by text.
        rows: of its embedding.
        base: the vocabulary and the merges without added tokens, as the file has them; None if it is no tokenizer.json.
        added: entries of the added tokens.
        own: whether the model has a tokenizer; without, its rows are taken for those of the template.
    """

    source: WeightSource
    tokens: Mapping[str, int]
    rows: int | None
    base: Any
    added: Sequence[Mapping[str, Any]]
    own: bool = True

    @classmethod
    def read(cls, source: WeightSource, file: Path | None, rows: int | None) -> "_Vocabulary":
        if file is None:
            return cls(source, {}, rows, None, (), own=False)
        tokens, base, added = _read_vocabulary(file, source)
        return cls(source, tokens, rows, base, added)

    def row_map(self, tokens: Mapping[str, int], names: Sequence[str | None]) -> np.ndarray:
        """Returns the model's own row for each row of the result, or -1."""
        result = np.full(len(names), -1, np.int64)
        if not self.own:
            result[:] = np.arange(len(names))
            return result
        taken = set(self.tokens.values())
        for row, name in enumerate(names):
            if name is None and row < (self.rows or 0) and row not in taken:
                result[row] = row
        for token, row in tokens.items():
            own = self.tokens.get(token, -1)
            if 0 <= own < (self.rows or 0) and row < len(names):
                result[row] = own
        return result

    def check(self, tokens: Mapping[str, int], rows: np.ndarray, *, is_template: bool) -> None:
        """Warns of tokens that are lost or borrowed; raises a UserError if most of them are."""
        if not self.own:
            return
        shared = len(tokens.keys() & self.tokens.keys())
        if tokens and shared < _LEAST_SHARED * len(tokens):
            raise UserError(
                f"`{self.source.name}` has only {shared:,} of the {len(tokens):,} tokens of the result",
                where="models",
                fix="only models with nearly the same vocabulary merge; others can answer together, as an ensemble",
            )
        if lost := sorted(self.tokens.keys() - tokens.keys(), key=lambda token: self.tokens[token]):
            log.warning(
                "%s: %s of its tokens are not in the result's tokenizer, the first is %s; `tokenizer: union` keeps "
                "added tokens",
                self.source.name,
                f"{len(lost):,}",
                shorten(repr(lost[0])),
            )
        if not is_template and (borrowed := int((rows < 0).sum())):
            log.warning("%s lacks %s rows of tokens, which take no part", self.source.name, f"{borrowed:,}")


def _owner(
    sources: Mapping[tuple[str, str | None], WeightSource], template: tuple[str, str | None], tokenizer: str
) -> WeightSource:
    if tokenizer in (BASE, UNION):
        return sources[template]
    names = {}
    for (model, adapter), source in sources.items():
        names[f"{model}+{adapter}" if adapter else model] = source
        names.setdefault(model, source)
    if tokenizer not in names:
        fix = suggest(tokenizer, (*names, BASE, UNION))
        raise UserError(f"`{tokenizer}` is none of the models", where="tokenizer", fix=fix)
    return names[tokenizer]


def _vocabulary_file(folder: Path) -> Path | None:
    return next((folder / name for name in _VOCABULARY_FILES if (folder / name).is_file()), None)


def _same(files: Sequence[Path | None]) -> bool:
    # The usual case, without reading megabytes of JSON.
    present = [file for file in files if file is not None]
    if len({file.name for file in present}) > 1:
        return False
    contents = (file.read_bytes() for file in present)
    first = next(contents, None)
    return all(content == first for content in contents)


def _row_count(source: WeightSource) -> int | None:
    """Returns the rows of the embedding; None if no tensor of the model is known for one."""
    for name, shape in source.shapes().items():
        if is_embedding(name) and len(shape) == 2:
            return shape[0]
    return None


def is_embedding(name: str) -> bool:
    """Returns whether a tensor is the embedding of the tokens, by its name."""
    return bool(_EMBEDDINGS.search(name))


def _is_by_token(name: str) -> bool:
    return is_embedding(name) or bool(_HEADS.search(name))


def _own_name(source: WeightSource, tensor: str) -> str:
    # A model with tied embeddings stores no head of its own.
    return EMBEDDING if tensor == HEAD and HEAD not in source.shapes() else tensor


def _read_vocabulary(file: Path, source: WeightSource) -> tuple[dict[str, int], Any, list[dict[str, Any]]]:
    """Returns the tokens, what makes the base vocabulary, and the entries of the added tokens."""
    if file.name != TOKENIZER:
        from posttrain.models.loading import load_tokenizer

        return dict(load_tokenizer(str(file.parent)).get_vocab()), None, []
    try:
        tokenizer = json.loads(file.read_bytes())
        model = tokenizer["model"]
        base = model["vocab"]
        added = [dict(entry) for entry in tokenizer.get("added_tokens") or []]
        # Unigram models hold a list of pairs, whose order numbers the tokens.
        tokens = {entry[0]: number for number, entry in enumerate(base)} if isinstance(base, list) else dict(base)
        tokens |= {entry["content"]: entry["id"] for entry in added}
        if not all(type(number) is int and number >= 0 for number in tokens.values()):
            raise ValueError
        merges = [
            tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model.get("merges") or []
        ]
        return tokens, (model.get("type"), base, merges), added
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise UserError("is damaged: it holds no vocabulary", where=str(file), fix="copy the model again") from None


def _checked_counts(
    vocabularies: Mapping[tuple[str, str | None], _Vocabulary], template: tuple[str, str | None]
) -> dict[tuple[str, str | None], int]:
    """Returns the rows of each model's embedding.

    Raises:
        UserError: rows differ and a model has no tokenizer to match them by, or no embedding.
    """
    reference = vocabularies[template]
    counts = {}
    for key, vocabulary in vocabularies.items():
        if vocabulary.rows is None:
            raise UserError(
                f"`{vocabulary.source.name}` has no embedding of a name that is known, and the vocabularies differ",
                where="models",
                fix="only models with one vocabulary merge",
            )
        if vocabulary.rows != reference.rows and not (vocabulary.own and reference.own):
            nameless = reference if vocabulary.own else vocabulary
            raise UserError(
                f"`{vocabulary.source.name}` has {vocabulary.rows:,} rows of tokens, `{reference.source.name}` has "
                f"{reference.rows:,}, and `{nameless.source.name}` holds no tokenizer to match them by",
                where="models",
                fix="copy its tokenizer into its folder",
            )
        counts[key] = vocabulary.rows
    return counts


def _unite(
    vocabularies: Mapping[tuple[str, str | None], _Vocabulary], template: tuple[str, str | None], folder: Path
) -> Mapping[str, int]:
    """Writes the template's tokenizer with the tokens that were added to the others; returns all tokens."""
    from tokenizers import AddedToken

    from posttrain.models.loading import load_tokenizer

    reference = vocabularies[template]
    new: dict[str, Mapping[str, Any]] = {}
    for vocabulary in vocabularies.values():
        if vocabulary is reference or not vocabulary.own:
            continue
        _check_base(vocabulary, reference)
        for entry in vocabulary.added:
            if entry["content"] not in reference.tokens:
                new.setdefault(entry["content"], entry)
    tokenizer = load_tokenizer(str(reference.source.tokenizer_folder))
    for content, entry in new.items():
        flags = {
            key: bool(entry.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        tokenizer.add_tokens([AddedToken(content, **flags)], special_tokens=flags["special"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    # Of the files, as these are what will be read.
    tokens, _, _ = _read_vocabulary(folder / TOKENIZER, reference.source)
    changed = [token for token, number in reference.tokens.items() if tokens.get(token) != number]
    if changed or new.keys() - tokens.keys():
        token = (changed or sorted(new.keys() - tokens.keys()))[0]
        raise UserError(
            f"the token {shorten(repr(token))} would get another number in the union",
            where="tokenizer",
            fix="choose the tokenizer of one model",
        )
    return tokens


def _check_base(vocabulary: _Vocabulary, reference: _Vocabulary) -> None:
    first, second = vocabulary.base, reference.base
    if first is not None and first == second:
        return
    names = f"`{vocabulary.source.name}` and `{reference.source.name}`"
    if first is None or second is None:
        why = f"one of {names} holds no {TOKENIZER}"
    elif first[0] != second[0]:
        why = f"{names} are a {first[0]} and a {second[0]} tokenizer"
    elif first[1] != second[1]:
        why = f"the vocabularies of {names} differ beyond added tokens"
    else:
        why = f"the merges of {names} differ"
    raise UserError(
        f"{why}, and one tokenizer cannot split text in two ways",
        where="tokenizer",
        fix="choose the tokenizer of one model",
    )


def _names(tokens: Mapping[str, int], count: int) -> list[str | None]:
    names: list[str | None] = [None] * count
    for token, row in tokens.items():
        if row < count:
            names[row] = token
    return names


def _is_identity(rows: np.ndarray, count: int | None) -> bool:
    return len(rows) == count and bool((rows == np.arange(len(rows))).all())


def _check_rows(maps: Mapping[tuple[str, str | None], np.ndarray], names: Sequence[str | None]) -> None:
    nowhere = np.flatnonzero(np.logical_and.reduce([rows < 0 for rows in maps.values()]))
    if len(nowhere):
        row = int(nowhere[0])
        raise UserError(
            f"no model has a row for number {row:,} ({shorten(repr(names[row]))})",
            where="tokenizer",
            fix="choose another model's tokenizer",
        )
