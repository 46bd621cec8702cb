"""Rows of JSON: one object a line, or one array of objects."""

import json
import re
import zlib
from collections.abc import Iterable
from typing import Any, NoReturn

from posttrain.data.reading.opening import LINE_BYTES, damaged, lines, opened, too_long
from posttrain.data.reading.paths import Place
from posttrain.data.reading.problem import Problem, shortened
from posttrain.data.reading.row import DEEPEST, Row, Rows, checked, is_utf16, not_utf8, nul_bytes


def json_lines(lines: Iterable[bytes], name: str, first_line: int = 1) -> Rows:
    """The objects of JSON lines; after a bad line the stream goes on.

    Args:
        lines: whole lines of a file, with or without their ends, in order.
        name: what problems call the file.
        first_line: the 1-based number of the first one.
    """
    scan = _DECODER.scan_once
    for line, raw in enumerate(lines, first_line):
        if raw.isspace() or not raw:
            continue
        if len(raw) > LINE_BYTES:
            yield too_long(name, line)
            continue
        try:
            text = raw.decode("utf-8-sig" if line == 1 else "utf-8").rstrip()
            try:
                value, end = scan(text, 0)
            except StopIteration:
                end = -1
            if end != len(text):
                value = _DECODER.decode(text)
            if repeated := _repeated_key(text, value):
                yield _repeated(repeated, name, line)
                continue
        except UnicodeDecodeError:
            yield not_utf8(raw, name, line)
            if line == 1 and is_utf16(raw):
                return
            continue
        except (ValueError, RecursionError) as error:
            if b"\0" in raw:
                yield not_utf8(raw, name, line) if line == 1 and is_utf16(raw) else nul_bytes(name, line)
                if line == 1 and is_utf16(raw):
                    return
            elif line == 1 and isinstance(error, json.JSONDecodeError) and text.startswith("["):
                yield Problem(
                    name, line, "not an object", "broken JSON: the file is no JSON lines but one array", _ARRAY
                )
                return
            else:
                yield _broken(error, name, line)
            continue
        if line == 1 and type(value) is list:
            yield Problem(name, line, "not an object", "a record must be a JSON object, and this is an array", _ARRAY)
            continue
        # Only an escape can bring what bytes of UTF-8 cannot, and what has few brackets is not deep.
        if type(value) is dict and b"\\u" not in raw and raw.count(b"{") + raw.count(b"[") < DEEPEST:
            yield Row(line, value)
        else:
            yield checked(value, name, line)


def json_file(path: Place, name: str) -> Rows:
    """A .json file holds one array of objects, or one object a line."""
    with opened(path, name) as file:
        try:
            start = file.read(1 << 16)
            is_array = start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
            whole = start + file.read() if is_array else None
        except (EOFError, zlib.error, OSError) as error:
            raise damaged(error, name, None) from None
    if whole is None:
        with opened(path, name) as file:
            yield from json_lines(lines(file, name), name)
    else:
        yield from _array(whole, name)


def _array(raw: bytes, name: str) -> Rows:
    if (nul := raw.find(b"\0")) >= 0:
        yield nul_bytes(name, raw.count(b"\n", 0, nul) + 1)
        return
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield not_utf8(raw, name, raw.count(b"\n", 0, error.start) + 1)
        return
    position, line = text.index("[") + 1, 1
    counted = 0
    while True:
        position = _skip_space(text, position)
        line, counted = line + text.count("\n", counted, position), position
        if text.startswith("]", position):
            if text[position + 1 :].strip():
                yield Problem(name, line, "broken JSON", "something follows the end of the array")
            return
        try:
            value, end = _DECODER.raw_decode(text, position)
            repeated = _repeated_key(text[position:end], value)
        except (ValueError, RecursionError) as error:
            yield _broken(error, name, getattr(error, "lineno", line))
            return
        yield _repeated(repeated, name, line) if repeated else checked(value, name, line)
        position = end
        position = _skip_space(text, position)
        if text.startswith(",", position):
            position += 1
        elif not text.startswith("]", position):
            line += text.count("\n", counted, position)
            yield Problem(name, line, "broken JSON", "broken JSON: `,` or `]` expected after a record")
            return


def _no_constant(constant: str) -> NoReturn:
    raise ValueError(f"`{constant}` is not JSON")


_DECODER: Any = json.JSONDecoder(parse_constant=_no_constant)
_ARRAY = "a file that holds one JSON array is named .json"


class _RepeatedKey(ValueError):
    """Its only argument is the key."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKey(next(key for place, key in enumerate(keys) if key in keys[:place]))
    return found


_KEY_ENDS = re.compile(r'"[ \t\r\n]*:')
_KEYS_APART = json.JSONDecoder(object_pairs_hook=_pairs)


def _repeated_key(text: str, value: Any) -> str | None:
    """A key that stands twice in one object, whose first value Python's decoder lets go without a word.

    Decoding with a look at every key takes half as long again, so it is done only where the text could hold more keys
    than the value. Every key is followed by a colon, and most texts hold few others.
    """
    if type(value) is not dict:
        return None
    colons = text.count(":")
    if colons == len(value) or colons == _keys_on_top(value) or len(_KEY_ENDS.findall(text)) == _keys(value):
        return None
    try:
        _KEYS_APART.decode(text)
    except _RepeatedKey as repeated:
        return str(repeated.args[0])
    return None


def _keys_on_top(value: dict[str, Any]) -> int:
    """The keys of an object and of the objects in its lists, such as turns."""
    count = len(value)
    for inner in value.values():
        if type(inner) is list:
            for one in inner:
                if type(one) is dict:
                    count += len(one)
    return count


def _keys(value: Any) -> int:
    """The keys of all objects of a value."""
    if type(value) is dict:
        return len(value) + sum([_keys(inner) for inner in value.values() if type(inner) in (dict, list)])
    return sum([_keys(inner) for inner in value if type(inner) in (dict, list)])


def _repeated(key: str, name: str, line: int) -> Problem:
    message = f"the key `{shortened(key)}` stands in one object twice"
    return Problem(name, line, "repeated column", message, "keep the right one")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _broken(error: Exception, name: str, line: int) -> Problem:
    if isinstance(error, RecursionError):
        message = f"nested too deeply (over {DEEPEST} levels)"
    elif isinstance(error, json.JSONDecodeError):
        message = f"{error.msg} (column {error.colno})"
    elif "integer string conversion" in str(error):
        message = "a number has thousands of digits"
    else:
        message = str(error)
    return Problem(name, line, "broken JSON", f"broken JSON: {message}")
