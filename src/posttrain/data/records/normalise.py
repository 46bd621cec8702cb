"""The normal form of a record's content, and the identities that are hashes of it."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Literal

import pyarrow as pa

Turn = Mapping[str, str]


_ESCAPED = {*range(32), 127, *b'"\\'}
_PLAIN = bytes(32 if chr(code).isspace() else 0 if code in _ESCAPED else code for code in range(128)) + bytes(128)
"""Of ASCII: all whitespace as spaces, and what JSON escapes as NUL."""

_ALMOST_ASCII = re.compile("[\x00-\x7f\u2010-\u2027\u2030-\u205e\u20a0-\u20cf]*")
"""Besides ASCII quotation marks, dashes and currencies, which neither NFC nor case folding changes."""

_TWO_SPACES = re.compile(b"  ")


def normal_text(text: str) -> str:
    """NFC, without outer whitespace, inner runs of whitespace folded to one space."""
    plain = _plain(text)
    return " ".join(unicodedata.normalize("NFC", text).split()) if plain is None else plain.decode()


def almost_ascii(text: str) -> bool:
    """Whether all that `comparable` changes in a text is ASCII: its letters and whitespace."""
    return text.isascii() or _ALMOST_ASCII.fullmatch(text) is not None


def comparable(text: str) -> str:
    """The form in which texts are compared: normalised and case-folded."""
    return normal_text(text).casefold()


def input_id(prompt: Sequence[Turn] | None, text: str | None, image: str | None = None) -> str:
    """20 hex characters that two records share exactly when their normalised inputs are equal."""
    return _digest(b"[%s, %s%s]" % (_turns(prompt), _json(text), _image(image)))


def record_id(
    prompt: Sequence[Turn] | None,
    completion: str | None,
    rejected: str | None,
    text: str | None,
    image: str | None = None,
) -> str:
    """20 hex characters that two records share exactly when their normalised contents are equal."""
    return identities(prompt, completion, rejected, text, image)[0]


def identities(
    prompt: Sequence[Turn] | None,
    completion: str | None,
    rejected: str | None,
    text: str | None,
    image: str | None = None,
) -> tuple[str, str]:
    """:func:`record_id` and :func:`input_id` in one go.

    Args:
        image: see `image_of`; what is asked of two images is not the same.
    """
    turns, words, shown = _turns(prompt), _json(text), _image(image)
    whole = b"[%s, %s, %s, %s%s]" % (turns, _json(completion), _json(rejected), words, shown)
    return _digest(whole), _digest(b"[%s, %s%s]" % (turns, words, shown))


def image_of(meta: str | None) -> str | None:
    """The image that a record's ``meta`` names, as it is named there; None for none."""
    if not meta or '"image"' not in meta:
        return None
    named = json.loads(meta).get("image")
    return named if isinstance(named, str) and named else None


def identify(table: pa.Table) -> pa.Table:
    """``table`` with ``id`` and ``input_id`` computed anew from the content."""
    columns = (table[name].to_pylist() for name in ("prompt", "completion", "rejected", "text", "meta"))
    ids, input_ids = [], []
    for prompt, completion, rejected, text, meta in zip(*columns, strict=True):
        whole, given = identities(prompt, completion, rejected, text, image_of(meta))
        ids.append(whole)
        input_ids.append(given)
    return _replace(_replace(table, "id", ids), "input_id", input_ids)


def without_answers(table: pa.Table) -> pa.Table:
    """``table`` as a pool: ``completion`` and ``rejected`` null, identities to match."""
    nothing = [None] * table.num_rows
    return identify(_replace(_replace(table, "completion", nothing), "rejected", nothing))


def input_texts(table: pa.Table) -> list[str]:
    """What is compared to find like inputs, one text a record: its text, or its turns one a line.

    The system turn is left out: it is the same in a whole file and would make all of it look alike.
    """
    return [
        text if prompt is None else "\n".join(turn["content"] for turn in prompt if turn["role"] != "system")
        for prompt, text in zip(table["prompt"].to_pylist(), table["text"].to_pylist(), strict=True)
    ]


Field = Literal["input", "answer", "all"]
"""Which words of a record a step reads: its prompt or text, its answer (both of a preference pair), or all of them."""


def texts_of(table: pa.Table, field: Field = "all") -> list[str]:
    """One text a record, its parts one a line; ``""`` where there are none."""
    inputs = input_texts(table) if field != "answer" else [None] * table.num_rows
    better, worse = (
        table[name].to_pylist() if field != "input" else [None] * table.num_rows for name in ("completion", "rejected")
    )
    return ["\n".join(part for part in parts if part is not None) for parts in zip(inputs, better, worse, strict=True)]


def _plain(text: str) -> bytes | None:
    """The normalised text when it is ASCII that JSON has nothing to escape in; else None."""
    if not text.isascii():
        return None
    raw = text.encode().translate(_PLAIN)
    if b"\0" in raw:
        return None
    raw = raw.strip(b" ")
    while _TWO_SPACES.search(raw):
        raw = raw.replace(b"  ", b" ")
    return raw


def _json(text: str | None) -> bytes:
    """The normalised text as JSON in ASCII, as ``json.dumps`` writes it."""
    if text is None:
        return b"null"
    plain = _plain(text)
    return encode_basestring_ascii(normal_text(text)).encode() if plain is None else b'"%s"' % plain


def _turns(prompt: Sequence[Turn] | None) -> bytes:
    if prompt is None:
        return b"null"
    said = [b"[%s, %s]" % (encode_basestring_ascii(turn["role"]).encode(), _json(turn["content"])) for turn in prompt]
    return b"[%s]" % b", ".join(said)


def _image(name: str | None) -> bytes:
    """Nothing for none, so that texts have the identity that they always had."""
    return b"" if name is None else b", %s" % encode_basestring_ascii(name).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def _replace(table: pa.Table, name: str, values: Sequence[str | None]) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values, pa.string()))
