"""Normalises texts, and derives the ids of records from them.

Two records that differ only in whitespace or in canonical Unicode forms have the same id.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring_ascii

import pyarrow as pa

from posttrain.store.text_files import normalise_text

Turn = Mapping[str, str]

_ESCAPED = {*range(32), 127, *b'"\\'}

_PLAIN = bytes(32 if chr(code).isspace() else 0 if code in _ESCAPED else code for code in range(128)) + bytes(128)
"""Translates ASCII whitespace to spaces, and all that JSON escapes to NUL, which `_plain_bytes` rejects."""

_ALMOST_ASCII = re.compile("[\x00-\x7f\u2010-\u2027\u2030-\u205e\u20a0-\u20cf]*")
"""ASCII, and the quotation marks, dashes and currencies that neither NFC nor case folding changes."""

_TWO_SPACES = re.compile(b"  ")

_WORD_CHARACTERS = (
    bytes(ord(chr(code).lower()) if chr(code).isalnum() else ord(" ") for code in range(128)) + b" " * 128
)

_NO_WORD = re.compile(r"[\W_]+")

_WITHOUT_SPACES = re.compile("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")


def is_nearly_ascii(text: str) -> bool:
    """Returns True if `fold_case` changes nothing but ASCII letters and whitespace."""
    return text.isascii() or _ALMOST_ASCII.fullmatch(text) is not None


def fold_case(text: str) -> str:
    """Normalises and case-fold a text, for comparisons."""
    # Most texts are plain ASCII, where bytes.translate is several times faster than unicodedata.
    plain = _plain_bytes(text)
    return normalise_text(text).casefold() if plain is None else plain.decode().casefold()


def input_id(prompt: Sequence[Turn] | None, text: str | None, image: str | None = None) -> str:
    """Returns 20 hex characters, equal exactly for records with equal normalised inputs."""
    return _digest(b"[%s, %s%s]" % (_turns_bytes(prompt), _json_bytes(text), _image_bytes(image)))


def record_id(
    prompt: Sequence[Turn] | None,
    completion: str | None,
    rejected: str | None,
    text: str | None,
    image: str | None = None,
) -> str:
    """Returns 20 hex characters, equal exactly for records with equal normalised contents."""
    return content_ids(prompt, completion, rejected, text, image)[0]


def content_ids(
    prompt: Sequence[Turn] | None,
    completion: str | None,
    rejected: str | None,
    text: str | None,
    image: str | None = None,
) -> tuple[str, str]:
    """Returns `record_id` and `input_id`, normalising each text once.

    Args:
        image: Result of `image_name`; the same question about two images is two inputs.
    """
    # The layout of these bytes must never change: every stored id and dataset version depends on it.
    turns, plain_text, image_part = _turns_bytes(prompt), _json_bytes(text), _image_bytes(image)
    whole = b"[%s, %s, %s, %s%s]" % (turns, _json_bytes(completion), _json_bytes(rejected), plain_text, image_part)
    return _digest(whole), _digest(b"[%s, %s%s]" % (turns, plain_text, image_part))


def image_name(meta: str | None) -> str | None:
    """Returns the image that a record's ``meta`` names, or None."""
    # The substring test saves parsing JSON for the many records without an image.
    if not meta or '"image"' not in meta:
        return None
    image = json.loads(meta).get("image")
    return image if isinstance(image, str) and image else None


def assign_ids(table: pa.Table) -> pa.Table:
    """Recomputes ``id`` and ``input_id`` of every record from its content."""
    columns = (table[name].to_pylist() for name in ("prompt", "completion", "rejected", "text", "meta"))
    ids, input_ids = [], []
    for prompt, completion, rejected, text, meta in zip(*columns, strict=True):
        record_hash, input_hash = content_ids(prompt, completion, rejected, text, image_name(meta))
        ids.append(record_hash)
        input_ids.append(input_hash)
    return _replace(_replace(table, "id", ids), "input_id", input_ids)


def without_answers(table: pa.Table) -> pa.Table:
    """Removes the answers, as a pool hides them: null ``completion`` and ``rejected``, and matching ids."""
    nulls = [None] * table.num_rows
    return assign_ids(_replace(_replace(table, "completion", nulls), "rejected", nulls))


def _plain_bytes(text: str) -> bytes | None:
    """Returns the normalised text if it is ASCII without characters that JSON escapes, else None."""
    if not text.isascii():
        return None
    raw = text.encode().translate(_PLAIN)
    if b"\0" in raw:
        return None
    raw = raw.strip(b" ")
    # Each pass halves the runs of spaces, and most texts need none.
    while _TWO_SPACES.search(raw):
        raw = raw.replace(b"  ", b" ")
    return raw


def _json_bytes(text: str | None) -> bytes:
    """Returns the normalised text as ASCII JSON, byte for byte as ``json.dumps`` writes it."""
    if text is None:
        return b"null"
    plain = _plain_bytes(text)
    return encode_basestring_ascii(normalise_text(text)).encode() if plain is None else b'"%s"' % plain


def _turns_bytes(prompt: Sequence[Turn] | None) -> bytes:
    if prompt is None:
        return b"null"
    parts = [
        b"[%s, %s]" % (encode_basestring_ascii(turn["role"]).encode(), _json_bytes(turn["content"])) for turn in prompt
    ]
    return b"[%s]" % b", ".join(parts)


def _image_bytes(name: str | None) -> bytes:
    """Returns the suffix for an image, empty for none."""
    # Empty, not "null": records of text keep the ids they had before records could name images.
    return b"" if name is None else b", %s" % encode_basestring_ascii(name).encode()


def _digest(content: bytes) -> str:
    # 80 bits: among a billion records the odds that two share an id are below one in a million.
    return hashlib.sha256(content).hexdigest()[:20]


def _replace(table: pa.Table, name: str, values: Sequence[str | None]) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values, pa.string()))


def plain_words(texts: Iterable[str]) -> list[str]:
    """Reduces each text to letters and digits in lower case, separated by spaces.

    As GPT-3's overlaps were counted (Brown et al. 2020, arXiv:2005.14165, appendix C).
    """
    return [_words_of_text(text) for text in texts]


def _words_of_text(text: str) -> str:
    if is_nearly_ascii(text):
        return text.encode("ascii", "replace").translate(_WORD_CHARACTERS).decode("ascii")
    # Chinese and Japanese have no spaces between words, so each character counts as one.
    return _NO_WORD.sub(" ", _WITHOUT_SPACES.sub(r" \1 ", fold_case(text)))
