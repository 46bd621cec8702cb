"""Runs datatrove's local executor on a folder of JSON lines, for ``data_pipeline.py``, in datatrove's own environment.

    python datatrove_pipeline.py INPUT SUITE OUTPUT near|own BUCKETS HASHES [held-out]

INPUT holds the files, one for each of two tasks; SUITE is a file of questions and answers. With ``held-out`` training
records must not share runs of words with the test split either, which takes one more pass. Prints the seconds of every
stage and the counts of records. These settings are for speed:

- the records are read three times and never written in between: duplicates are identified by their positions, so
  that the last pass drops both, splits, decontaminates and writes;
- uncompressed JSON lines, written without ``dataclasses.asdict``; signatures read 1,000 at a time, not 5;
- processes are forked.

``near`` splits words by whitespace, after datatrove's own ``simplify_text`` has replaced punctuation by spaces, and
leaves numbers and diacritics as they are. ``own`` uses the defaults: the words of spaCy's tokenizer, all numbers
replaced by one, no diacritics.
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

# The indexer requires lighteval to download suites; a suite from a file does not need it.
NGramsDecontIndexer._requires_dependencies = []


class WhitespaceTokenizer(WordTokenizer):
    """Splits words by whitespace alone."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        return [text]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [(0, len(text))]


class Normalise(BaseFormatter):
    """Normalises to NFC, one kind of line end and no trailing whitespace; datatrove's FTFY does more and is slower."""

    name = "Unicode and whitespace"

    def format(self, text: str) -> str:
        return "\n".join([line.rstrip() for line in unicodedata.normalize("NFC", text).splitlines()]).strip("\n")


class Indexer(NGramsDecontIndexer):
    """Indexes a suite's file, or else the documents, by datatrove's own ``compute_hashes``."""

    def __init__(self, folder: str, config: NGramsDecontConfig, language: WordTokenizer | str, suite: str = "") -> None:
        super().__init__(folder, config=config, language=language)
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
    """Applies datatrove's filter to training records only."""

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        return is_held_out(doc) or super().filter(doc)


def get_text(document: Document) -> str:
    return document.text


def split(data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
    """Name a record's split by the hash of its text."""
    for document in data:
        held_out = xxhash.xxh64_intdigest(document.text) < _TEST_SHARE * 2**64
        document.metadata["split"] = "test" if held_out else "train"
        yield document


def is_held_out(document: Document) -> bool:
    return document.metadata["split"] == "test"


def to_row(writer: JsonlWriter, document: Document) -> dict[str, str]:
    return {"id": document.id, "text": document.text}


class Stages:
    """Runs stages and records their times.

    Attributes:
        seconds: wall-clock seconds by stage.
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
        stats = executor.run()
        self.seconds[name] = time.perf_counter() - start
        return stats


def main(source: str, suite: str, output: str, setting: str, buckets: str, hashes: str, held_out: str = "") -> None:
    root = Path(output)
    folders = {name: str(root / name) for name in ("hashes", "exact", "sketches", "pairs", "near", "suite", "output")}
    near = setting == "near"
    tokenizer: WordTokenizer | str = WhitespaceTokenizer() if near else "eng"
    normalisation = TextNormConfig(norm_numbers=not near, norm_unicode_diacritics=not near)
    exact_config = ExactDedupConfig(content_getter=get_text)
    minhash = MinhashConfig(num_buckets=int(buckets), hashes_per_bucket=int(hashes), norm_config=normalisation)
    ngram_config = NGramsDecontConfig(n_grams=_NGRAM, find_query_ngrams=True, norm_config=normalisation)

    def reading_steps() -> list[PipelineStep]:
        return [JsonlReader(source), Normalise()]

    def deduplication_steps() -> list[object]:
        drop_near = MinhashDedupFilter(folders["near"], lines_to_buffer=_LINES)
        return [*reading_steps(), ExactDedupFilter(folders["exact"], exact_config), drop_near, split]

    stages = Stages(root / "logs")
    start = time.perf_counter()
    signature = ExactDedupSignature(folders["hashes"], exact_config, _CORES)
    stages.run("read, normalise, hash", [*reading_steps(), signature], _CORES)
    finder = ExactFindDedups(folders["hashes"], folders["exact"], exact_config, lines_to_buffer=_LINES)
    stages.run("equal hashes", [finder], _CORES)
    sketch = MinhashDedupSignature(folders["sketches"], minhash, tokenizer)
    drop_exact = ExactDedupFilter(folders["exact"], exact_config)
    stages.run("MinHash signatures", [*reading_steps(), drop_exact, sketch], _CORES)
    find_pairs = MinhashDedupBuckets(folders["sketches"], folders["pairs"], config=minhash, lines_to_buffer=_LINES)
    stages.run("MinHash buckets", [find_pairs], minhash.num_buckets)
    find_clusters = MinhashDedupCluster(folders["pairs"], folders["near"], minhash, lines_to_buffer=_LINES)
    stages.run("MinHash clusters", [find_clusters], 1)
    stages.run("index of the suite", [Indexer(folders["suite"], ngram_config, tokenizer, suite)], 1)
    if held_out:
        steps = [*deduplication_steps(), LambdaFilter(is_held_out), Indexer(folders["suite"], ngram_config, tokenizer)]
        stages.run("index of the test split", steps, _CORES)
    decontaminate = TrainingFilter(folders["suite"], ngram_config, language=tokenizer)
    writer = JsonlWriter(folders["output"], "${split}/${rank}.jsonl", compression=None, adapter=to_row)
    last_steps = [*deduplication_steps(), decontaminate, writer]
    stats = stages.run("drop, split, decontaminate, write", last_steps, _CORES)
    seconds = time.perf_counter() - start
    counts = {step_stats.name: step_stats.stats for step_stats in stats.stats}
    n_removed = {
        name: int(counts[str(step)]["dropped"].total)
        for name, step in (("exact", last_steps[2]), ("minhash", last_steps[3]), ("decontaminate", decontaminate))
    }
    n_kept = int(counts[str(writer)]["total"].total)
    print(json.dumps({"seconds": seconds, "stages": stages.seconds, "kept": n_kept, "removed": n_removed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
