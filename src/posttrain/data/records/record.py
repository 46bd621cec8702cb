"""Defines records: their Arrow schema, the ids that follow from their content, and the texts in a table of them.

Two records that differ only in whitespace or in canonical Unicode forms have the same id.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from posttrain.store.text_files import normalise_lines, normalise_text

TextField = Literal["input", "answer", "all"]
"""The part of a record that a step reads: the prompt or text, the answer (both of a preference pair), or all."""

Turn = Mapping[str, str]
"""A turn of a dialogue: its ``role`` and ``content``."""

TURN = pa.struct([("role", pa.string()), ("content", pa.string())])

RECORD: pa.Schema = pa.schema(
    [
        ("id", pa.string()),
        ("input_id", pa.string()),
        ("prompt", pa.list_(TURN)),
        ("completion", pa.string()),
        ("rejected", pa.string()),
        ("text", pa.string()),
        ("group", pa.string()),
        ("source", pa.string()),
        ("line", pa.int64()),
        ("meta", pa.string()),
    ]
)
"""The schema of records, one per row.

- ``id``: hash of the whole normalised content; ``input_id``: of the prompt or text alone; both with the name of the
  image, where ``meta`` has one as ``image``.
- ``prompt``: the turns before the answer; null for plain text.
- ``completion``: the answer, the better one of a preference pair; null while unlabelled.
- ``rejected``: the worse answer of a preference pair; null otherwise.
- ``text``: plain text; null otherwise.
- ``group``: records that must stay in one split; null for none.
- ``source``, ``line``: the file as named by the user, and the 1-based line (row in Parquet and Arrow).
- ``meta``: JSON object of all other columns of the file.
"""

REJECTED: pa.Schema = pa.schema(
    [
        *RECORD,
        pa.field("step", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("score", pa.float64()),
        pa.field("cluster", pa.string()),
        pa.field("kept", pa.string()),
    ]
)
"""A record that a step rejected: the step, the reason (a category), the detail (of this record), the number that the
decision rests on, and for a duplicate the ids of its cluster's first record and of the one that is kept."""

CHANGED: pa.Schema = pa.schema(
    [("id", pa.string()), ("before", pa.string()), ("step", pa.string()), ("detail", pa.string())]
)
"""A record that a step changed, or derived from another: its id, the id before or of the other, and the change."""

FACT: pa.Schema = pa.schema(
    [
        ("id", pa.string()),
        ("step", pa.string()),
        ("name", pa.string()),
        ("value", pa.float64()),
        ("text", pa.string()),
    ]
)
"""A measurement of a record, kept or rejected: a number or a string."""

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


def records(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Builds a RECORD table of ``rows``, each with every column."""
    return pa.Table.from_pylist(list(rows), schema=RECORD)


def concat(tables: Sequence[pa.Table], schema: pa.Schema = RECORD) -> pa.Table:
    """Concatenates tables to contiguous columns; no tables give an empty one."""
    # The empty table makes no tables a table, too, and refuses one of another schema.
    return pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()


def locations(table: pa.Table) -> list[str]:
    """Returns ``file:line`` of every record."""
    return [
        f"{source}:{line}" for source, line in zip(table["source"].to_pylist(), table["line"].to_pylist(), strict=True)
    ]


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
    *,
    normalised: bool = True,
) -> tuple[str, str]:
    """Returns `record_id` and `input_id`, normalising each text once.

    Args:
        image: Result of `image_name`; the same question about two images is two inputs.
        normalised: False if texts count as they are.
    """
    # The layout of these bytes must never change: every stored id and dataset version depends on it.
    write = _json_bytes if normalised else _raw_bytes
    turns, plain_text, image_part = _turns_bytes(prompt, write), write(text), _image_bytes(image)
    whole = b"[%s, %s, %s, %s%s]" % (turns, write(completion), write(rejected), plain_text, image_part)
    return _digest(whole), _digest(b"[%s, %s%s]" % (turns, plain_text, image_part))


def exact_ids(table: pa.Table) -> tuple[list[str], list[str]]:
    """Returns ``id`` and ``input_id`` of every record, and hashes of their own where a text has several lines.

    There whitespace says something, which ids ignore: texts are compared as by `normalise_lines`.
    """
    ids, input_ids = table["id"].to_pylist(), table["input_id"].to_pylist()
    several = [held.rows[_has_lines(held.texts)] for held in text_columns(table)]
    rows = np.unique(np.concatenate(several))
    for row, record in zip(rows.tolist(), table.take(pa.array(rows)).to_pylist(), strict=True):
        ids[row], input_ids[row] = exact_record_ids(record)
    return ids, input_ids


def exact_record_ids(record: Mapping[str, Any]) -> tuple[str, str]:
    """Returns one record's `exact_ids`."""
    if not any("\n" in text or "\r" in text for text in record_texts(record)):
        return record["id"], record["input_id"]
    record = {**record, **map_texts(record, normalise_lines)}
    contents = {name: record[name] for name in ("prompt", "completion", "rejected", "text")}
    return content_ids(**contents, image=image_name(record["meta"]), normalised=False)


def _has_lines(texts: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(pa.compute.match_substring_regex(texts, r"[\r\n]").to_numpy(zero_copy_only=False), dtype=bool)


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


def _raw_bytes(text: str | None) -> bytes:
    return b"null" if text is None else encode_basestring_ascii(text).encode()


def _turns_bytes(prompt: Sequence[Turn] | None, write: Callable[[str | None], bytes] = _json_bytes) -> bytes:
    if prompt is None:
        return b"null"
    parts = [b"[%s, %s]" % (encode_basestring_ascii(turn["role"]).encode(), write(turn["content"])) for turn in prompt]
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


class TextColumn(NamedTuple):
    """The M texts of one column of a RECORD table, in row order.

    Attributes:
        column: Name of the column.
        texts: large_string [M].
        rows: int64 [M], the row of each text.
    """

    column: str
    texts: pa.Array
    rows: npt.NDArray[np.int64]


def input_texts(table: pa.Table) -> list[str]:
    """Returns one string per record: its text, or its turns one per line, without the system turn."""
    # A system turn is the same in a whole file, and would make all of its inputs look alike.
    return [
        text if prompt is None else "\n".join(turn["content"] for turn in prompt if turn["role"] != "system")
        for prompt, text in zip(table["prompt"].to_pylist(), table["text"].to_pylist(), strict=True)
    ]


def joined_texts(table: pa.Table, field: TextField = "all") -> list[str]:
    """Returns one string per record, its texts one per line; ``""`` where there are none."""
    inputs = input_texts(table) if field != "answer" else [None] * table.num_rows
    better, worse = (
        table[name].to_pylist() if field != "input" else [None] * table.num_rows for name in ("completion", "rejected")
    )
    return ["\n".join(part for part in parts if part is not None) for parts in zip(inputs, better, worse, strict=True)]


def text_columns(table: pa.Table, field: TextField = "all") -> Iterator[TextColumn]:
    """Yields all texts of a RECORD table but nulls: all turns (system turns too), answers and plain texts."""
    for name in _columns(field):
        column = table[name].combine_chunks()
        if name == "prompt":
            rows = pa.compute.list_parent_indices(column)
            column = pa.compute.struct_field(pa.compute.list_flatten(column), "content")
        else:
            rows = pa.compute.indices_nonzero(pa.compute.is_valid(column))
            column = column.drop_null()
        yield TextColumn(name, column.cast(pa.large_string()), np.asarray(rows.to_numpy(), dtype=np.int64))


def record_texts(record: Mapping[str, Any], field: TextField = "all", system: bool = True) -> list[str]:
    """Returns the texts of one record.

    Args:
        system: True if system turns are included.
    """
    texts: list[str] = []
    for name in _columns(field):
        if name == "prompt":
            turns = record["prompt"] or []
            texts += [turn["content"] for turn in turns if system or turn["role"] != "system"]
        elif record[name] is not None:
            texts.append(record[name])
    return texts


def map_texts(
    record: Mapping[str, Any], function: Callable[[str], str], field: TextField = "all", system: bool = True
) -> dict[str, Any]:
    """Applies a function to the texts of a record, and returns the columns that change.

    Args:
        system: True if system turns are mapped too.
    """
    changed: dict[str, Any] = {}
    for name in _columns(field):
        value = record[name]
        if value is None:
            continue
        if name == "prompt":
            new: Any = [
                {**turn, "content": function(turn["content"])} if system or turn["role"] != "system" else turn
                for turn in value
            ]
        else:
            new = function(value)
        if new != value:
            changed[name] = new
    return changed


def first_empty(values: Mapping[str, Any]) -> str | None:
    """Returns the name of the first column that holds an empty text, such as one that `map_texts` returns."""
    for name, value in values.items():
        texts = [turn["content"] for turn in value] if name == "prompt" else [value]
        if "" in texts:
            return name
    return None


def _columns(field: TextField) -> tuple[str, ...]:
    inputs, answers = ("prompt", "text"), ("completion", "rejected")
    return {"input": inputs, "answer": answers, "all": inputs + answers}[field]
