"""Rows of JSON: one object a line, or one array of objects."""

import json
import re
import zlib
from collections.abc import Iterable
from typing import Any

from posttrain.data.reading.data_files import (
    MAX_LINE_BYTES,
    DataPath,
    decompression_error,
    long_line_problem,
    open_file,
    read_lines,
)
from posttrain.data.reading.rows import (
    MAX_DEPTH,
    Problem,
    Row,
    Rows,
    check_row,
    is_utf16,
    not_utf8_problem,
    nul_problem,
)
from posttrain.store.text_files import RepeatedKey, reject_constant, unique_pairs


def json_lines(lines: Iterable[bytes], name: str, first_line: int = 1) -> Rows:
    """Yields the objects of JSON lines; after a bad line the stream continues.

    Args:
        lines: whole lines of a file, with or without their ends, in order.
        name: what problems call the file.
        first_line: the 1-based number of the first one.
    """
    scan = _DECODER.scan_once  # skips two regular expressions for whitespace that `decode` runs on every line
    for line, raw in enumerate(lines, first_line):
        if raw.isspace() or not raw:
            continue
        if len(raw) > MAX_LINE_BYTES:
            yield long_line_problem(name, line)
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
                yield _repeated_key_problem(repeated, name, line)
                continue
        except UnicodeDecodeError:
            yield not_utf8_problem(raw, name, line)
            if line == 1 and is_utf16(raw):
                return
            continue
        except (ValueError, RecursionError) as error:
            if b"\0" in raw:
                yield not_utf8_problem(raw, name, line) if line == 1 and is_utf16(raw) else nul_problem(name, line)
                if line == 1 and is_utf16(raw):
                    return
            elif line == 1 and isinstance(error, json.JSONDecodeError) and text.startswith("["):
                yield Problem(
                    name, line, "not an object", "broken JSON: the file is not JSON lines but one array", _ARRAY_FIX
                )
                return
            else:
                yield broken_json_problem(error, name, line)
            continue
        if line == 1 and type(value) is list:
            yield Problem(
                name, line, "not an object", "a record must be a JSON object, and this is an array", _ARRAY_FIX
            )
            continue
        # Valid UTF-8 holds no lone surrogate unless it is escaped, and few brackets cannot nest deeply: most rows need
        # no check.
        if type(value) is dict and b"\\u" not in raw and raw.count(b"{") + raw.count(b"[") < MAX_DEPTH:
            yield Row(line, value)
        else:
            yield check_row(value, name, line)


def json_file(path: DataPath, name: str) -> Rows:
    """Yields the rows of a .json file: one array of objects, or one object a line."""
    with open_file(path, name) as file:
        try:
            start = file.read(1 << 16)
            is_array = start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
            whole = start + file.read() if is_array else None
        except (EOFError, zlib.error, OSError) as error:
            raise decompression_error(error, name, None) from None
    if whole is None:
        # Only an array has to be read as a whole; lines are streamed.
        with open_file(path, name) as file:
            yield from json_lines(read_lines(file, name), name)
    else:
        yield from _array_rows(whole, name)


def _array_rows(raw: bytes, name: str) -> Rows:
    if (nul := raw.find(b"\0")) >= 0:
        yield nul_problem(name, raw.count(b"\n", 0, nul) + 1)
        return
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield not_utf8_problem(raw, name, raw.count(b"\n", 0, error.start) + 1)
        return
    position, line = text.index("[") + 1, 1
    counted = 0
    while True:
        position = _skip_space(text, position)
        # Line ends are counted from the last record on, or a long array would be scanned once for each of them.
        line, counted = line + text.count("\n", counted, position), position
        if text.startswith("]", position):
            if text[position + 1 :].strip():
                yield Problem(name, line, "broken JSON", "something follows the end of the array")
            return
        try:
            value, end = _DECODER.raw_decode(text, position)
            repeated = _repeated_key(text[position:end], value)
        except (ValueError, RecursionError) as error:
            yield broken_json_problem(error, name, getattr(error, "lineno", line))
            return
        yield _repeated_key_problem(repeated, name, line) if repeated else check_row(value, name, line)
        position = end
        position = _skip_space(text, position)
        if text.startswith(",", position):
            position += 1
        elif not text.startswith("]", position):
            line += text.count("\n", counted, position)
            yield Problem(name, line, "broken JSON", "broken JSON: `,` or `]` expected after a record")
            return


_DECODER: Any = json.JSONDecoder(parse_constant=reject_constant)
_ARRAY_FIX = "a file that holds one JSON array is named .json"


_KEY_ENDS = re.compile(r'"[ \t\r\n]*:')
_STRICT_DECODER = json.JSONDecoder(object_pairs_hook=unique_pairs)


def _repeated_key(text: str, value: Any) -> str | None:
    """Returns a key that occurs twice in one object, or None."""
    # Python's decoder silently drops the first value of such a key. Decoding with a check of every key takes half as
    # long again, so it runs only where the text has more colons than the value has keys.
    if type(value) is not dict:
        return None
    colons = text.count(":")
    if colons == len(value) or colons == _count_top_keys(value) or len(_KEY_ENDS.findall(text)) == _count_keys(value):
        return None
    try:
        _STRICT_DECODER.decode(text)
    except RepeatedKey as repeated:
        return repeated.key
    return None


def _count_top_keys(value: dict[str, Any]) -> int:
    """Counts the keys of an object and of the objects in its lists, such as turns."""
    count = len(value)
    for inner in value.values():
        if type(inner) is list:
            for item in inner:
                if type(item) is dict:
                    count += len(item)
    return count


def _count_keys(value: Any) -> int:
    """Counts the keys of all objects of a value."""
    if type(value) is dict:
        return len(value) + sum([_count_keys(inner) for inner in value.values() if type(inner) in (dict, list)])
    return sum([_count_keys(inner) for inner in value if type(inner) in (dict, list)])


def _repeated_key_problem(key: str, name: str, line: int) -> Problem:
    return Problem(name, line, "repeated column", str(RepeatedKey(key)), "keep the right one")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def broken_json_problem(error: Exception, name: str, line: int) -> Problem:
    """Returns the problem of a text that a decoder refused with ``error``."""
    if isinstance(error, RecursionError):
        message = f"nested too deeply (over {MAX_DEPTH} levels)"
    elif isinstance(error, json.JSONDecodeError):
        message = f"{error.msg} (column {error.colno})"
    elif "integer string conversion" in str(error):
        message = "a number has thousands of digits"
    else:
        message = str(error)
    return Problem(name, line, "broken JSON", f"broken JSON: {message}")
