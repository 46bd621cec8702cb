"""The normal form of texts, and the record identities that are hashes of it."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring_ascii

import pyarrow as pa

Turn = Mapping[str, str]

_ESCAPED = {*range(32), 127, *b'"\\'}

_PLAIN = bytes(32 if chr(code).isspace() else 0 if code in _ESCAPED else code for code in range(128)) + bytes(128)
"""Of ASCII: all whitespace as spaces, and what JSON escapes as NUL."""

_ALMOST_ASCII = re.compile("[\x00-\x7f\u2010-\u2027\u2030-\u205e\u20a0-\u20cf]*")
"""Besides ASCII quotation marks, dashes and currencies, which neither NFC nor case folding changes."""

_TWO_SPACES = re.compile(b"  ")

_WORD_CHARACTERS = (
    bytes(ord(chr(code).lower()) if chr(code).isalnum() else ord(" ") for code in range(128)) + b" " * 128
)

_NO_WORD = re.compile(r"[\W_]+")

_WITHOUT_SPACES = re.compile("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")


def normalise_text(text: str) -> str:
    """NFC, without outer whitespace, inner runs of whitespace folded to one space."""
    plain = _plain_bytes(text)
    return " ".join(unicodedata.normalize("NFC", text).split()) if plain is None else plain.decode()


def is_nearly_ascii(text: str) -> bool:
    """Whether all that `fold_case` changes in a text is ASCII: its letters and whitespace."""
    return text.isascii() or _ALMOST_ASCII.fullmatch(text) is not None


def fold_case(text: str) -> str:
    """The form in which texts are compared: normalised and case-folded."""
    return normalise_text(text).casefold()


def input_id(prompt: Sequence[Turn] | None, text: str | None, image: str | None = None) -> str:
    """20 hex characters that two records share exactly when their normalised inputs are equal."""
    return _digest(b"[%s, %s%s]" % (_turns_bytes(prompt), _json_bytes(text), _image_bytes(image)))


def record_id(
    prompt: Sequence[Turn] | None,
    completion: str | None,
    rejected: str | None,
    text: str | None,
    image: str | None = None,
) -> str:
    """20 hex characters that two records share exactly when their normalised contents are equal."""
    return content_ids(prompt, completion, rejected, text, image)[0]


def content_ids(
    prompt: Sequence[Turn] | None,
    completion: str | None,
    rejected: str | None,
    text: str | None,
    image: str | None = None,
) -> tuple[str, str]:
    """:func:`record_id` and :func:`input_id` in one go.

    Args:
        image: see `image_name`; what is asked of two images is not the same.
    """
    turns, words, shown = _turns_bytes(prompt), _json_bytes(text), _image_bytes(image)
    whole = b"[%s, %s, %s, %s%s]" % (turns, _json_bytes(completion), _json_bytes(rejected), words, shown)
    return _digest(whole), _digest(b"[%s, %s%s]" % (turns, words, shown))


def image_name(meta: str | None) -> str | None:
    """The image that a record's ``meta`` names, as it is named there; None for none."""
    if not meta or '"image"' not in meta:
        return None
    named = json.loads(meta).get("image")
    return named if isinstance(named, str) and named else None


def assign_ids(table: pa.Table) -> pa.Table:
    """``table`` with ``id`` and ``input_id`` computed anew from the content."""
    columns = (table[name].to_pylist() for name in ("prompt", "completion", "rejected", "text", "meta"))
    ids, input_ids = [], []
    for prompt, completion, rejected, text, meta in zip(*columns, strict=True):
        whole, given = content_ids(prompt, completion, rejected, text, image_name(meta))
        ids.append(whole)
        input_ids.append(given)
    return _replace(_replace(table, "id", ids), "input_id", input_ids)


def without_answers(table: pa.Table) -> pa.Table:
    """``table`` as a pool: ``completion`` and ``rejected`` null, identities to match."""
    nothing = [None] * table.num_rows
    return assign_ids(_replace(_replace(table, "completion", nothing), "rejected", nothing))


def _plain_bytes(text: str) -> bytes | None:
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


def _json_bytes(text: str | None) -> bytes:
    """The normalised text as JSON in ASCII, as ``json.dumps`` writes it."""
    if text is None:
        return b"null"
    plain = _plain_bytes(text)
    return encode_basestring_ascii(normalise_text(text)).encode() if plain is None else b'"%s"' % plain


def _turns_bytes(prompt: Sequence[Turn] | None) -> bytes:
    if prompt is None:
        return b"null"
    said = [
        b"[%s, %s]" % (encode_basestring_ascii(turn["role"]).encode(), _json_bytes(turn["content"])) for turn in prompt
    ]
    return b"[%s]" % b", ".join(said)


def _image_bytes(name: str | None) -> bytes:
    """Nothing for none, so that texts have the identity that they always had."""
    return b"" if name is None else b", %s" % encode_basestring_ascii(name).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def _replace(table: pa.Table, name: str, values: Sequence[str | None]) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values, pa.string()))


def plain_words(texts: Iterable[str]) -> list[str]:
    """Each text as its letters and digits in lower case, everything else a space, as GPT-3's overlaps were counted
    (Brown et al. 2020, arXiv:2005.14165, appendix C). Chinese and Japanese characters are words of their own."""
    return [_words_of_text(text) for text in texts]


def _words_of_text(text: str) -> str:
    if is_nearly_ascii(text):
        return text.encode("ascii", "replace").translate(_WORD_CHARACTERS).decode("ascii")
    return _NO_WORD.sub(" ", _WITHOUT_SPACES.sub(r" \1 ", fold_case(text)))
