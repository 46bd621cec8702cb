"""Rejects records that are malformed, unanswered, too short or too long."""

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
from pydantic import Field

from posttrain.data.records.outcome import Outcome, Rejection, reject_rows
from posttrain.data.records.record import input_texts, text_columns
from posttrain.data.steps.bounds import Bound, apply_bounds, ratio
from posttrain.data.steps.step import RowStep
from posttrain.store.section import Section

# The bytes 0x80 to 0xBF, which continue a character in UTF-8, as Windows-1252 or Latin-1 shows them.
_CONTINUATION = "[\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"

# In the syntax of RE2, by which Arrow counts them, such as \x{fffd} for a code point.
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
    """Rejects records with broken encoding, absurd length or empty turns.

    Broken encoding shows as NULs and other control characters (except tabs and line ends), as U+FFFD, which decoders
    write for invalid bytes, as private-use characters, which mean nothing without their font, and as *mojibake*:
    UTF-8 that was read as Windows-1252 or Latin-1, such as Ã© for é. A few such sequences pass, as a capital letter
    before a sign can be right. Run it before ``normalise``, which removes control characters.
    """

    name: ClassVar[str] = "schema"
    evaluation: ClassVar[bool] = True
    max_characters: int | None = Field(1_000_000, ge=0, description="Most characters of a record.")
    max_turns: int | None = Field(1_000, ge=0, description="Most turns of a prompt.")

    def apply(self, table: pa.Table) -> Outcome:
        names = ("characters", "turns", *_PATTERNS)
        counts: dict[str, npt.NDArray[np.float64]] = {name: np.zeros(table.num_rows) for name in names}
        # Counted over Arrow's buffers: a Python string for each of a million texts would take most of the time.
        for column, texts, rows in text_columns(table):
            counts["characters"] += _by_row(rows, pa.compute.utf8_length(texts), table.num_rows)
            if column == "prompt":
                counts["turns"] += np.bincount(rows, minlength=table.num_rows)
            for name, pattern in _PATTERNS.items():
                if column == "prompt" or name != "empty_turns":
                    matches = pa.compute.count_substring_regex(texts, pattern)
                    counts[name] += _by_row(rows, matches, table.num_rows)
        measures = {
            **counts,
            "replacement_share": ratio(counts["replacement_characters"], counts["characters"]),
            "private_share": ratio(counts["private_characters"], counts["characters"]),
        }
        bounds = [
            Bound("NUL characters", "nul_characters", "at most", 0),
            Bound("control characters", "control_characters", "at most", 0),
            Bound("replacement characters", "replacement_share", "at most", 0.001),
            Bound("private-use characters", "private_share", "at most", 0.01),
            Bound("mojibake", "mojibake", "at most", 2),
            Bound("too long", "characters", "at most", self.max_characters),
            Bound("too many turns", "turns", "at most", self.max_turns),
            Bound("empty turns", "empty_turns", "at most", 0),
        ]
        return apply_bounds(table, self.name, measures, bounds)


def _by_row(rows: npt.NDArray[np.int64], values: pa.Array, size: int) -> npt.NDArray[np.float64]:
    weights = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return np.bincount(rows, weights=weights, minlength=size).astype(np.float64)


class Answers(RowStep):
    """Rejects prompts without an answer; plain text needs none."""

    name: ClassVar[str] = "answers"
    evaluation: ClassVar[bool] = True
    needs_answers: ClassVar[bool] = True

    def apply(self, table: pa.Table) -> Outcome:
        missing = pa.compute.and_(pa.compute.is_null(table["completion"]), pa.compute.is_null(table["text"]))
        # numpy's, as pyarrow 25's own crashes the process on a column without chunks.
        rows = np.flatnonzero(missing.to_numpy()).tolist()
        return reject_rows(table, self.name, dict.fromkeys(rows, Rejection("no answer", "the answer is empty")))


class Lengths(Section):
    """Bounds on one part of a record; a bound that is not set rejects nothing."""

    min_characters: int | None = Field(None, ge=0, description="Fewest characters (code points).")
    max_characters: int | None = Field(None, ge=0, description="Most characters (code points).")
    min_words: int | None = Field(None, ge=0, description="Fewest words, split at whitespace.")
    max_words: int | None = Field(None, ge=0, description="Most words, split at whitespace.")


class Length(RowStep):
    """Rejects records whose input or answer has too few or too many characters or words; without settings all pass.

    The input is a record's text, or its turns without the system turn. Both answers of a preference pair must keep to
    the bounds; a record without an answer breaks none of them. Facts: characters and words of the input and of the
    (better) answer.
    """

    name: ClassVar[str] = "length"
    input: Lengths = Field(Lengths(), description="Bounds on the prompt or text.")
    answer: Lengths = Field(Lengths(), description="Bounds on each answer.")

    def apply(self, table: pa.Table) -> Outcome:
        inputs = pa.array(input_texts(table), pa.large_string())
        measures, bounds = {}, []
        for name, texts, lengths in (
            ("input", inputs, self.input),
            ("answer", table["completion"], self.answer),
            ("worse_answer", table["rejected"], self.answer),
        ):
            measures[f"{name}_characters"] = _characters(texts)
            measures[f"{name}_words"] = _words(texts)
            what = name.replace("_", " ")
            bounds += [
                Bound(f"{what} too short", f"{name}_characters", "at least", lengths.min_characters),
                Bound(f"{what} too long", f"{name}_characters", "at most", lengths.max_characters),
                Bound(f"{what} too short", f"{name}_words", "at least", lengths.min_words),
                Bound(f"{what} too long", f"{name}_words", "at most", lengths.max_words),
            ]
        outcome = apply_bounds(table, self.name, measures, bounds)
        # Both answers of a pair are bounded, and only the better one is what a model learns.
        facts = {name: values for name, values in outcome.facts.items() if not name.startswith("worse")}
        return outcome._replace(facts=facts)


def _characters(texts: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.float64]:
    lengths = pa.compute.cast(pa.compute.utf8_length(texts), pa.float64())
    return np.asarray(lengths.to_numpy(zero_copy_only=False), dtype=np.float64)


def _words(texts: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.float64]:
    counts = [np.nan if text is None else len(text.split()) for text in texts.to_pylist()]
    return np.array(counts, dtype=np.float64)
