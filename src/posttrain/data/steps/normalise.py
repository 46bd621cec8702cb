"""Writes texts in one form of Unicode and whitespace."""

import re
import unicodedata
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
from pydantic import Field

from posttrain.data.records.outcome import Outcome, Rejection, reject_rows, rewrite
from posttrain.data.records.record import first_empty, map_texts, text_columns
from posttrain.data.steps.step import RowStep

UnicodeForm = Literal["nfc", "nfkc", "keep"]
"""Unicode normal form (Unicode Standard Annex #15): canonical, compatible as well (ﬁ to fi, ² to 2), or as it is."""

Quotes = Literal["keep", "straight"]
"""Curly quotation marks stay, or become the straight ones of a keyboard."""

_SPACES = "\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000"

_LINE_ENDS = "\v\f\x1c-\x1e\x85\u2028\u2029"

_CONTROLS = "\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f"

# Soft hyphen, zero-width space and no-break space, word joiner and other signs without a shape, marks of direction,
# fillers, interlinear marks, tags, and code points that are not characters.
_INVISIBLE = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\u3164\ufeff\uffa0"
    "\ufff9-\ufffb\ufdd0-\ufdef\ufffe\uffff\U000e0000-\U000e007f"
)

_JOINERS = "\u200c\u200d"

_SPACE = re.compile(f"[{_SPACES}]")

_LINE_END = re.compile(f"\r\n|[\r{_LINE_ENDS}]")

_REMOVED = re.compile(f"[{_CONTROLS}{_INVISIBLE}]")

# Between two characters beyond ASCII joiners shape letters (Persian, Indic scripts) and make one emoji of several.
_IDLE_JOINERS = re.compile(rf"(?<![^\x00-\x7f])[{_JOINERS}]++|(?<![{_JOINERS}])[{_JOINERS}]++(?![^\x00-\x7f])")

_UNUSUAL = re.compile(f"[\r{_SPACES}{_LINE_ENDS}{_CONTROLS}{_INVISIBLE}{_JOINERS}]")

_CURLY = str.maketrans("‘’‚‛“”„‟′″", "''''\"\"\"\"'\"")

# Letters, signs and ideographs of common scripts that stand in no composition of Unicode as a second character.
_SAFE = (
    "\u00a1-\u00ac\u00ae-\u02ff\u0400-\u0482\u048a-\u052f\u2010-\u2027\u2030-\u205e\u20a0-\u20bf\u3001-\u3029"
    "\u3030-\u303e\u3041-\u3096\u309d-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uff01-\uff9f"
)

# Whitespace that `_clean_once` removes, for RE2, whose end of text is \z.
_LOOSE = r"[ \t]\n|\n\n|\A\n|[ \t\n]\z"


class Normalise(RowStep):
    """Rewrites every text, system turns too, in one form of Unicode and whitespace, as `clean_text` does.

    Ids ignore whitespace and canonical forms, so only some of the rewritten records get a new id; these are listed as
    changed. Evaluation records are rewritten in the same way. A record is rejected if one of its texts holds nothing
    visible.
    """

    name: ClassVar[str] = "normalise"
    evaluation: ClassVar[bool] = True
    unicode: UnicodeForm = Field("nfc", description="Unicode normal form: nfc, nfkc, or keep the text as it is.")
    quotes: Quotes = Field("keep", description="Keep quotation marks, or make curly ones straight.")

    def apply(self, table: pa.Table) -> Outcome:
        function = partial(clean_text, form=self.unicode, quotes=self.quotes)
        suspects = _rows_to_clean(table, dirty_pattern(self.unicode, self.quotes))
        texts = table.select(["prompt", "completion", "rejected", "text"]).take(pa.array(suspects)).to_pylist()
        values: dict[int, dict[str, Any]] = {}
        rejections: dict[int, Rejection] = {}
        for row, record in zip(suspects.tolist(), texts, strict=True):
            if new := map_texts(record, function):
                if name := first_empty(new):
                    rejections[row] = Rejection("empty", f"the {name} holds nothing that can be seen")
                else:
                    values[row] = new
        if not values:
            return reject_rows(table, self.name, rejections)
        table, changed = rewrite(table, values, self.name, dict.fromkeys(values, "Unicode and whitespace"))
        return reject_rows(table, self.name, rejections)._replace(changed=changed)


def _rows_to_clean(table: pa.Table, pattern: str) -> npt.NDArray[np.int64]:
    """Returns the rows with a text that may change, in order."""
    # A regular expression over Arrow's buffers rules most texts out without making Python strings of them.
    rows = [
        held.rows[pa.compute.match_substring_regex(held.texts, pattern).to_numpy(zero_copy_only=False)]
        for held in text_columns(table)
    ]
    return np.unique(np.concatenate(rows))


def dirty_pattern(form: UnicodeForm = "nfc", quotes: Quotes = "keep") -> str:
    """Returns an RE2 expression that matches every text that `clean_text` changes, and few others."""
    safe = "" if form == "nfkc" or quotes == "straight" else _SAFE
    return f"[^\\n\\t\\x20-\\x7e{safe}]|{_LOOSE}"


def clean_text(text: str, form: UnicodeForm = "nfc", quotes: Quotes = "keep", blank_lines: int = 2) -> str:
    """Cleans a text; cleaning the result again changes nothing.

    Line ends of all systems become line feeds, and spaces of all widths become the space. Control characters, invisible
    characters and marks of direction are removed; joiners stay only between characters beyond ASCII. Spaces and tabs
    at the ends of lines are removed, and so are line ends at the start and whitespace at the end of the text. The
    indentation of lines and the spaces within them stay, as they have a meaning in code.

    Args:
        blank_lines: The most consecutive blank lines to keep.
    """
    # Again until nothing changes: a removed character may join two that compose, or leave a line blank.
    while (new := _clean_once(text, form, quotes, blank_lines)) != text:
        text = new
    return new


def _clean_once(text: str, form: UnicodeForm, quotes: Quotes, blank_lines: int) -> str:
    if not text.isascii():
        if form != "keep":
            text = unicodedata.normalize("NFC" if form == "nfc" else "NFKC", text)
        if quotes == "straight":
            text = text.translate(_CURLY)
    if _UNUSUAL.search(text):
        text = _IDLE_JOINERS.sub("", _REMOVED.sub("", _SPACE.sub(" ", _LINE_END.sub("\n", text))))
    if " \n" in text or "\t\n" in text:
        text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
    text = text.rstrip(" \t\n").lstrip("\n")
    most = "\n" * (blank_lines + 1)
    return re.sub(f"{most}\n+", most, text) if most + "\n" in text else text
