"""Rows of CSV and TSV with a header."""

from collections.abc import Iterator

from posttrain.data.reading.opening import LINE_BYTES, lines, opened
from posttrain.data.reading.paths import Place, file_format
from posttrain.data.reading.problem import Problem, shortened
from posttrain.data.reading.row import BadFile, Rows, checked, is_utf16, not_utf8
from posttrain.store.text import delimited

DELIMITERS = {".csv": ",", ".tsv": "\t"}


def delimited_rows(path: Place, name: str) -> Rows:
    """The rows of a .csv or .tsv file; undecodable bytes pass as lone surrogates, so that only their row is refused."""
    with opened(path, name) as file:
        delimiter = DELIMITERS[file_format(path)]
        text = _Text(lines(file, name), name, delimiter)
        header: list[str] | None = None
        for line, cells in delimited(text, delimiter):
            if isinstance(cells, str):
                fix = "quote fields that hold the delimiter" if header else None
                yield Problem(name, *text.explained(line, cells), fix)
                if header is None:
                    return
            elif header is not None:
                yield checked(dict(zip(header, cells, strict=True)), name, line)
            else:
                header = cells
                if repeated := _repeated(header):
                    message = f"column `{shortened(repeated)}` stands in the header twice"
                    yield Problem(name, line, "repeated column", message)
                    return
            text.start_row()


class _Text:
    """Decoded lines that remember the row that is being read."""

    def __init__(self, lines: Iterator[bytes], name: str, delimiter: str) -> None:
        self._lines, self._name, self._delimiter = lines, name, delimiter
        self._row: list[str] = []
        self._size = 0
        self._read = 0
        self._start = 1

    def __iter__(self) -> Iterator[str]:
        for raw in self._lines:
            self._read += 1
            if self._read == 1 and is_utf16(raw):
                raise BadFile(not_utf8(raw, self._name, 1))
            line = raw.decode("utf-8-sig" if self._read == 1 else "utf-8", errors="surrogateescape")
            self._row.append(line)
            self._size += len(raw)
            if self._size > LINE_BYTES:
                message = f"broken CSV: a row is longer than {LINE_BYTES:,} bytes, the most that is read"
                fix = "close the quote that opens here, or double a quote that belongs to the text"
                raise BadFile(Problem(self._name, self._quote(), "broken CSV", message, fix))
            yield line

    def start_row(self) -> None:
        """Forget the row that has been read."""
        self._row.clear()
        self._size = 0
        self._start = self._read + 1

    def explained(self, line: int, what: str) -> tuple[int, str, str]:
        """The line to look at when the row that begins on ``line`` is wrong, the kind, and what is wrong there."""
        if "new-line character" in what:
            what = "broken CSV: a carriage return ends no line here; save the file with line ends of Unix or Windows"
        elif what.startswith("broken CSV"):
            line = self._quote()
        elif len(self._row) > 1 and self._read > line:
            what += f", in a row that runs to line {self._read}; is the quote meant that opens on line {self._quote()}?"
        return line, "broken CSV", what

    def _quote(self) -> int:
        """1-based line at which the quote opens that never closes, or that closes in the middle of a field."""
        text = "".join(self._row)
        position = 0
        opening = 0
        while position < len(text):
            if text[position] == '"':
                opening = position
                position = self._closing(text, position)
                if position == len(text) or text[position] not in (self._delimiter, "\r", "\n"):
                    break
            ends = [end for mark in (self._delimiter, "\n") if (end := text.find(mark, position)) >= 0]
            position = min(ends, default=len(text)) + 1
        return self._start + text.count("\n", 0, opening)

    @staticmethod
    def _closing(text: str, opening: int) -> int:
        """The position after the quoted field that opens there."""
        position = opening + 1
        while True:
            position = text.find('"', position) + 1
            if position == 0:
                return len(text)
            if not text.startswith('"', position):
                return position
            position += 1


def _repeated(header: list[str]) -> str | None:
    seen: set[str] = set()
    for cell in header:
        if cell in seen:
            return cell
        seen.add(cell)
    return None
