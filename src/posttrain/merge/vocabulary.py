"""Matches the vocabularies of models: a row of an embedding must mean the same token in all of them."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.merge.sources import WeightSource, is_embedding
from posttrain.merge.vocabulary_view import VocabularyView
from posttrain.store.errors import UserError, shorten, suggest
from posttrain.store.message import counted

log = logging.getLogger("posttrain")

BASE, UNION = "base", "union"

TOKENIZER = "tokenizer.json"

# In the order of preference; the first that is there is the vocabulary's.
_VOCABULARY_FILES = (TOKENIZER, "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")

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


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of one model.

    Attributes:
        tokens: number by text.
        rows: of its embedding.
        base: the vocabulary and the merges without added tokens, as the file has them; None without a tokenizer.json.
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
        used_rows = set(self.tokens.values())
        for row, name in enumerate(names):
            if name is None and row < (self.rows or 0) and row not in used_rows:
                result[row] = row
        for token, row in tokens.items():
            own = self.tokens.get(token, -1)
            if 0 <= own < (self.rows or 0) and row < len(names):
                result[row] = own
        return result

    def check(self, tokens: Mapping[str, int], rows: np.ndarray, *, is_template: bool) -> None:
        """Warns of tokens that are lost or missing; raises a UserError if most of them are."""
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
        if not is_template and (missing := int((rows < 0).sum())):
            log.warning("%s lacks %s of tokens, which take no part", self.source.name, counted(missing, "row"))


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
        raise UserError(f"`{tokenizer}` is not one of the models", where="tokenizer", fix=fix)
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
    """Returns the number of rows of the embedding; None if no tensor has the name of an embedding."""
    for name, shape in source.shapes().items():
        if is_embedding(name) and len(shape) == 2:
            return shape[0]
    return None


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
    """Raises a UserError unless two tokenizers differ in added tokens alone."""
    if vocabulary.base is None or vocabulary.base != reference.base:
        names = f"`{vocabulary.source.name}` and `{reference.source.name}`"
        raise UserError(
            f"the tokenizers of {names} differ beyond added tokens, and one tokenizer cannot split text in two ways",
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
