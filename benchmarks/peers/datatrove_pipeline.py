"""datatrove's local executor over a folder of JSON lines: run by ``data_pipeline.py`` in datatrove's own environment.

    python datatrove_pipeline.py INPUT SUITE OUTPUT near|own BUCKETS HASHES [held-out]

INPUT holds the files, one for each of two tasks; SUITE is a file of questions and answers. With ``held-out`` training
records must not share runs of words with the test split either, which takes one more pass. Prints the seconds of every
stage and the counts of records. What is set for speed:

- the records are read three times and never written in between: exact and near duplicates are named by their places, so
  that the last pass drops both, splits, decontaminates and writes;
- uncompressed JSON lines, written without ``dataclasses.asdict``; signatures read 1,000 at a time, not 5;
- processes are forked.

``near`` also takes words for what whitespace parts once its own ``simplify_text`` has made spaces of punctuation, and
leaves numbers and diacritics as they are. ``own`` has its defaults there: the words of spaCy's tokenizer, every number
the same, no diacritics.
"""

import json
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash
from datatrove.data import Document, DocumentsPipeline
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.decont import NGramsDecontConfig, NGramsDecontFilter, NGramsDecontIndexer
from datatrove.pipeline.dedup import (
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.formatters.base import BaseFormatter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.stats import PipelineStats
from datatrove.utils.text import TextNormConfig
from datatrove.utils.word_tokenizers import WordTokenizer

_CORES = 2
_LINES = 1000
_NGRAM = 13
_TEST_SHARE = 0.01

# The indexer wants lighteval for the suites that it downloads; one from a file needs nothing of it.
NGramsDecontIndexer._requires_dependencies = []


class Spaces(WordTokenizer):
    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        return [text]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [(0, len(text))]


class Normalise(BaseFormatter):
    """NFC, one kind of line end, no whitespace at the ends of lines; its FTFY does more and takes far longer."""

    name = "Unicode and whitespace"

    def format(self, text: str) -> str:
        return "\n".join([line.rstrip() for line in unicodedata.normalize("NFC", text).splitlines()]).strip("\n")


class Indexer(NGramsDecontIndexer):
    """Its index, made by its own ``compute_hashes``: of a suite's file, or of the documents that come."""

    def __init__(self, folder: str, config: NGramsDecontConfig, words: WordTokenizer | str, suite: str = "") -> None:
        super().__init__(folder, config=config, language=words)
        self.suite = suite

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        pairs: list[tuple[str, str | None]] = [(document.text, None) for document in data or ()]
        if self.suite:
            rows = map(json.loads, Path(self.suite).read_text(encoding="utf-8").splitlines())
            pairs += [(row["answer"], row["question"]) for row in rows]
        hashes = {value for label, query in pairs for value in self.compute_hashes(label, query)}
        with self.output_folder.open(f"{'suite' if self.suite else rank}.index.hashes", mode="wb") as file:
            file.write(np.array(list(hashes), dtype=self.config.hash_config.np_descr).tobytes())


class TrainingFilter(NGramsDecontFilter):
    """Its filter for training records alone."""

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        return is_held_out(doc) or super().filter(doc)


def text_of(document: Document) -> str:
    return document.text


def split(data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
    """Name a record's split by the hash of its text."""
    for document in data:
        held_out = xxhash.xxh64_intdigest(document.text) < _TEST_SHARE * 2**64
        document.metadata["split"] = "test" if held_out else "train"
        yield document


def is_held_out(document: Document) -> bool:
    return document.metadata["split"] == "test"


def row_of(writer: JsonlWriter, document: Document) -> dict[str, str]:
    return {"id": document.id, "text": document.text}


class Stages:
    """Runs one stage after the other and keeps their seconds.

    Attributes:
        seconds: by stage.
    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.seconds: dict[str, float] = {}

    def run(self, name: str, steps: list[object], tasks: int) -> PipelineStats:
        start = time.perf_counter()
        executor = LocalPipelineExecutor(
            steps,
            tasks=tasks,
            workers=min(tasks, _CORES),
            logging_dir=str(self.logs / name.replace(" ", "_")),
            start_method="fork",
        )
        found = executor.run()
        self.seconds[name] = time.perf_counter() - start
        return found


def main(given: str, suite: str, output: str, setting: str, buckets: str, hashes: str, held_out: str = "") -> None:
    place = Path(output)
    folders = {name: str(place / name) for name in ("hashes", "same", "sketches", "pairs", "gone", "suite", "kept")}
    near = setting == "near"
    words: WordTokenizer | str = Spaces() if near else "eng"
    norm = TextNormConfig(norm_numbers=not near, norm_unicode_diacritics=not near)
    exact = ExactDedupConfig(content_getter=text_of)
    minhash = MinhashConfig(num_buckets=int(buckets), hashes_per_bucket=int(hashes), norm_config=norm)
    ngrams = NGramsDecontConfig(n_grams=_NGRAM, find_query_ngrams=True, norm_config=norm)

    def records() -> list[PipelineStep]:
        return [JsonlReader(given), Normalise()]

    def survivors() -> list[object]:
        alike = MinhashDedupFilter(folders["gone"], lines_to_buffer=_LINES)
        return [*records(), ExactDedupFilter(folders["same"], exact), alike, split]

    stages = Stages(place / "logs")
    start = time.perf_counter()
    stages.run("read, normalise, hash", [*records(), ExactDedupSignature(folders["hashes"], exact, _CORES)], _CORES)
    finder = ExactFindDedups(folders["hashes"], folders["same"], exact, lines_to_buffer=_LINES)
    stages.run("equal hashes", [finder], _CORES)
    sketch = MinhashDedupSignature(folders["sketches"], minhash, words)
    drop_equal = ExactDedupFilter(folders["same"], exact)
    stages.run("MinHash signatures", [*records(), drop_equal, sketch], _CORES)
    meet = MinhashDedupBuckets(folders["sketches"], folders["pairs"], config=minhash, lines_to_buffer=_LINES)
    stages.run("MinHash buckets", [meet], minhash.num_buckets)
    join = MinhashDedupCluster(folders["pairs"], folders["gone"], minhash, lines_to_buffer=_LINES)
    stages.run("MinHash clusters", [join], 1)
    stages.run("index of the suite", [Indexer(folders["suite"], ngrams, words, suite)], 1)
    if held_out:
        steps = [*survivors(), LambdaFilter(is_held_out), Indexer(folders["suite"], ngrams, words)]
        stages.run("index of the test split", steps, _CORES)
    decontaminate = TrainingFilter(folders["suite"], ngrams, language=words)
    writer = JsonlWriter(folders["kept"], "${split}/${rank}.jsonl", compression=None, adapter=row_of)
    last = [*survivors(), decontaminate, writer]
    found = stages.run("drop, split, decontaminate, write", last, _CORES)
    seconds = time.perf_counter() - start
    counts = {one.name: one.stats for one in found.stats}
    removed = {
        name: int(counts[str(step)]["dropped"].total)
        for name, step in (("exact", last[2]), ("minhash", last[3]), ("decontaminate", decontaminate))
    }
    kept = int(counts[str(writer)]["total"].total)
    print(json.dumps({"seconds": seconds, "stages": stages.seconds, "kept": kept, "removed": removed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
