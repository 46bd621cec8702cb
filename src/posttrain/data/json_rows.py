"""Rows of JSON: one object a line, or one array of objects."""

import json
import zlib
from collections.abc import Iterable
from typing import Any, NoReturn

from posttrain.data.opening import LINE_BYTES, damaged, lines, opened, too_long
from posttrain.data.paths import Place
from posttrain.data.problem import Problem
from posttrain.data.row import DEEPEST, Row, Rows, checked, is_utf16, not_utf8, nul_bytes


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
            else:
                yield _broken(error, name, line)
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
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            yield _broken(error, name, getattr(error, "lineno", line))
            return
        yield checked(value, name, line)
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
