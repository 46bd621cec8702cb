"""The rules of the Colossal Clean Crawled Corpus."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field as Setting

from posttrain.data.records.contents import emptied, revised, texts
from posttrain.data.records.normalise import Field, texts_of
from posttrain.data.steps.rewrite import rewrite
from posttrain.data.steps.step import Outcome, Rejection, RowStep, part

POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")

_ENDS = (".", "!", "?", '"', "”")
_BREAKS_OFF = ("...", "…")
_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
_SENTENCE = re.compile(r"(?<![.!?])[.!?]++[\"”'’)\]]*+(?=\s|\Z)")


class C4(RowStep):
    """Of web pages the lines that are sentences stay, and pages with too few of them go.

    The rules are those of Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (JMLR 21(140), 2020, arXiv:1910.10683), section 2.2: lines stay that end in a terminal punctuation
    mark and have at least ``min_words_per_line`` words; lines go that name Javascript, and lines about policies; marks
    of citation go out of lines; pages go that contain "lorem ipsum" or a curly bracket anywhere, and those that are
    left with fewer than ``min_sentences`` sentences. The longest word and the phrases about policies are those of the
    program that made the corpus, where the least numbers are 3 sentences and 5 words. Sentences are counted by their
    ends, so that an abbreviation in the middle of a line counts, too. Not here: bad words, the language, and
    three-sentence spans that recur, which have steps of their own.

    Meant for English web text: nearly every chat message goes, and code loses its lines. The texts of a record are
    one page together; the record goes if one of them is left without a line. The system's turns are left alone.
    """

    name: ClassVar[str] = "c4"
    field: Field = Setting("input", description="which words of a record are the page: input, answer or all")
    terminal_punctuation: bool = Setting(True, description="whether lines that do not end like a sentence go")
    min_words_per_line: int = Setting(3, ge=0, description="fewest words of a line that stays")
    min_sentences: int = Setting(5, ge=0, description="fewest sentences of a page")
    max_word_length: int = Setting(1000, ge=1, description="most characters of a word in a line that stays")
    javascript: bool = Setting(True, description="whether lines that name Javascript go")
    policies: bool = Setting(True, description="whether lines go that speak of cookies, privacy or terms of use")
    citations: bool = Setting(True, description="whether marks such as [1] and [citation needed] go out of lines")
    lorem_ipsum: bool = Setting(True, description="whether pages with placeholder text go")
    curly_brackets: bool = Setting(True, description="whether pages with a curly bracket go")

    def apply(self, table: pa.Table) -> Outcome:
        pages = texts_of(table, self.field)
        columns = table.select(["prompt", "completion", "rejected", "text"]).to_pylist()
        rejections: dict[int, Rejection] = {}
        values: dict[int, dict[str, Any]] = {}
        sentences: list[float | None] = []
        for row, (page, record) in enumerate(zip(pages, columns, strict=True)):
            if not page:
                sentences.append(None)
                continue
            new = revised(record, self._kept_lines, self.field, system=False)
            left = _sentences({**record, **new}, self.field)
            sentences.append(left)
            if rejection := self._rejection(page, left, emptied(new)):
                rejections[row] = rejection
            elif new:
                values[row] = new
        facts = {"sentences": pa.array(sentences, pa.float64())}
        if not values:
            return part(table, self.name, rejections, facts)
        table, changed = rewrite(table, values, self.name, dict.fromkeys(values, "lines that are no sentences"))
        return part(table, self.name, rejections, facts)._replace(changed=changed)

    def _rejection(self, page: str, sentences: float, emptied: str | None) -> Rejection | None:
        if self.lorem_ipsum and "lorem ipsum" in page.lower():
            return Rejection("lorem ipsum", "placeholder text")
        if self.curly_brackets and "{" in page:
            return Rejection("curly bracket", "looks like code", float(page.count("{")))
        if sentences < self.min_sentences:
            detail = f"sentences {sentences:.0f}, must be at least {self.min_sentences}"
            return Rejection("too few sentences", detail, sentences)
        return Rejection("no line left", f"the {emptied} loses all lines") if emptied else None

    def _kept_lines(self, text: str) -> str:
        stripped = (line.strip() for line in text.split("\n"))
        cited = (_CITATION.sub("", line).rstrip() for line in stripped) if self.citations else stripped
        return "\n".join(line for line in cited if self._stays(line))

    def _stays(self, line: str) -> bool:
        words, lower = line.split(), line.lower()
        return not (
            len(words) < max(self.min_words_per_line, 1)
            or (self.terminal_punctuation and (not line.endswith(_ENDS) or line.endswith(_BREAKS_OFF)))
            or (len(line) > self.max_word_length and max(map(len, words)) > self.max_word_length)
            or (self.javascript and "javascript" in lower)
            or (self.policies and any(phrase in lower for phrase in POLICY))
        )


def _sentences(record: Mapping[str, Any], field: Field) -> float:
    return float(sum(len(_SENTENCE.findall(text)) for text in texts(record, field, system=False)))
