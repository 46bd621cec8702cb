"""Records that were read but cannot be what their author wrote."""

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
from pydantic import Field as Setting

from posttrain.data.records.contents import contents
from posttrain.data.steps.bounds import Bound, judge, share
from posttrain.data.steps.step import Outcome, RowStep

# The bytes 0x80 to 0xBF, which continue a character in UTF-8, as Windows-1252 or Latin-1 shows them.
_CONTINUATION = "[\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"

_PATTERNS = {
    "nul_characters": r"\x00",
    "control_characters": r"[\x01-\x08\x0e-\x1f\x7f-\x{9f}]",
    "replacement_characters": r"\x{fffd}",
    "private_characters": r"[\x{e000}-\x{f8ff}\x{f0000}-\x{ffffd}\x{100000}-\x{10fffd}]",
    # é as Ã©, quotation marks as â€™, Cyrillic letters as ÐŸ and Ñ€, emoji as ðŸ˜€.
    "mojibake": f"[ÂÃÐÑ]{_CONTINUATION}|â[€‚„\u0080-\u0084]{_CONTINUATION}|ð[Ÿ\u009f]{_CONTINUATION}",
    "empty_turns": r"\A\s*\z",
}


class Schema(RowStep):
    """Records whose encoding went wrong somewhere, that are absurdly long, or that have empty turns go.

    Looked for are NULs and other control characters (but tab and the ends of lines), the character U+FFFD that stands
    for bytes that were no text, private-use characters, whose meaning left with their font, and *mojibake*: UTF-8
    that was read as Windows-1252 or Latin-1, such as Ã© for é. As capital letters may stand before signs by right,
    a few of those pass. To be run before ``normalise``, which takes control characters out.
    """

    name: ClassVar[str] = "schema"
    evaluation: ClassVar[bool] = True
    max_control_characters: int | None = Setting(0, ge=0, description="most control characters, and most NULs")
    max_replacement_share: float | None = Setting(
        0.001, ge=0, le=1, description="largest share of characters that are U+FFFD"
    )
    max_private_share: float | None = Setting(
        0.01, ge=0, le=1, description="largest share of characters that are of a private-use area"
    )
    max_mojibake: int | None = Setting(2, ge=0, description="most sequences that look like UTF-8 read as Windows-1252")
    max_characters: int | None = Setting(1_000_000, ge=0, description="most characters of a record")
    max_turns: int | None = Setting(1_000, ge=0, description="most turns of a prompt")
    empty_turns: bool = Setting(False, description="whether turns without a word may stand in a prompt")

    def apply(self, table: pa.Table) -> Outcome:
        names = ("characters", "turns", *_PATTERNS)
        counts: dict[str, npt.NDArray[np.float64]] = {name: np.zeros(table.num_rows) for name in names}
        for column, texts, rows in contents(table):
            counts["characters"] += _by_row(rows, pa.compute.utf8_length(texts), table.num_rows)
            if column == "prompt":
                counts["turns"] += np.bincount(rows, minlength=table.num_rows)
            for name, pattern in _PATTERNS.items():
                if column == "prompt" or name != "empty_turns":
                    found = pa.compute.count_substring_regex(texts, pattern)
                    counts[name] += _by_row(rows, found, table.num_rows)
        measures = {
            **counts,
            "replacement_share": share(counts["replacement_characters"], counts["characters"]),
            "private_share": share(counts["private_characters"], counts["characters"]),
        }
        bounds = [
            Bound("NUL characters", "nul_characters", "at most", self.max_control_characters),
            Bound("control characters", "control_characters", "at most", self.max_control_characters),
            Bound("replacement characters", "replacement_share", "at most", self.max_replacement_share),
            Bound("private-use characters", "private_share", "at most", self.max_private_share),
            Bound("mojibake", "mojibake", "at most", self.max_mojibake),
            Bound("too long", "characters", "at most", self.max_characters),
            Bound("too many turns", "turns", "at most", self.max_turns),
            Bound("empty turns", "empty_turns", "at most", None if self.empty_turns else 0),
        ]
        return judge(table, self.name, measures, bounds)


def _by_row(rows: npt.NDArray[np.int64], values: pa.Array, size: int) -> npt.NDArray[np.float64]:
    weights = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return np.bincount(rows, weights=weights, minlength=size).astype(np.float64)
