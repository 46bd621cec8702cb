"""Evaluate models on the suites, and time candidate and champion side by side."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.data.config import DataConfig
from posttrain.data.reading.reader import read
from posttrain.data.sets.pool_and_test import input_digests
from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.latency import answer_function, measure_latency
from posttrain.evaluate.metric_names import flat_metrics
from posttrain.evaluate.scorers.base import sample_records
from posttrain.evaluate.suite import read_evaluation, run_suite, write_evaluation
from posttrain.loop.context import RoundContext, task_key
from posttrain.models.task import record_turns
from posttrain.store.artifacts import Artifact
from posttrain.store.extensions import load_function
from posttrain.store.hashing import file_digest

LATENCY = "latency.json"


def evaluate(turn: RoundContext, model: str, test: Artifact, *, full: bool = False) -> Artifact:
    """Score a model on every suite; ``full`` takes all records where a suite names a sample."""
    suites = turn.config.evaluate.suites

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        lm = turn.model(model)
        results = {
            name: run_suite(lm, suite_records(turn, suite, test), suite, name, full=full)
            for name, suite in suites.items()
        }
        write_evaluation(out, results)
        return {"metrics": flat_metrics(results), "full": full}

    # In their order: the first suite's metrics need no prefix.
    settings = [[name, suite.model_dump(mode="json")] for name, suite in suites.items()]
    digests = _suite_digests(turn)
    inputs = {"model": model, "test": test.id, **digests}
    config = {"suites": settings, "full": full, **task_key(turn.config)}
    if digests:
        config["columns"] = turn.config.data.columns
    return turn.stage("evaluate", "evaluation", inputs, config, work, version=2, seeded=False)


def measure(turn: RoundContext, candidate: str, champion: str, test: Artifact) -> Artifact | None:
    """Latency percentiles of both models, interleaved on the same prompts; None when switched off."""
    config = turn.config.evaluate.latency
    if not config.prompts:
        return None

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        records = sample_records(turn.dataset(test.id).records, config.prompts)
        prompts = [record_turns(record) for record in records.select(["prompt", "text"]).to_pylist()]
        models = {"candidate": turn.model(candidate)}
        if champion != candidate:
            models["champion"] = turn.model(champion)
        main = next(iter(turn.config.evaluate.suites.values()))
        answer = answer_function(main, bool(turn.config.task.label_set))
        timed = measure_latency(models, prompts, config.repeats, answer=answer)
        (out / LATENCY).write_text(json.dumps({"champion": timed["candidate"], **timed}), encoding="utf-8")
        return {}

    inputs = {"candidate": candidate, "champion": champion, "test": test.id}
    scorer = next(iter(turn.config.evaluate.suites.values())).scorer
    settings = {"latency": config.model_dump(mode="json"), "scorer": scorer, **task_key(turn.config)}
    return turn.stage("latency", "latency", inputs, settings, work, seeded=False)


def metrics_of(turn: RoundContext, evaluation: str, latency: Artifact | None, role: str) -> dict[str, float]:
    """A model's metrics by bare name; ``role`` is candidate or champion in the latency measurement."""
    metrics = flat_metrics(read_evaluation(turn.path(evaluation)))
    if latency is not None:
        timed = json.loads((turn.path(latency.id) / LATENCY).read_text(encoding="utf-8"))[role]
        metrics |= {name: value for name, value in timed.items() if name != "n"}
    return metrics


def suite_records(turn: RoundContext, suite: SuiteConfig, test: Artifact) -> pa.Table:
    """RECORD table of what a suite measures on."""
    if suite.data == "test":
        return turn.dataset(test.id).records
    path = turn.workspace.root / Path(suite.data).expanduser()
    return pa.concat_tables(read(path, suite.columns or turn.config.data.columns, name=suite.data))


def _suite_digests(turn: RoundContext) -> dict[str, str]:
    """Content digests of the suites' files, and of the modules whose functions score."""
    suites = turn.config.evaluate.suites
    files = [suite.data for suite in suites.values() if suite.data != "test"]
    digests = input_digests(DataConfig(pool=files), turn.workspace.root)
    for name, suite in suites.items():
        if suite.function:
            load_function(suite.function, f"evaluate.suites.{name}.function")
            source = getattr(sys.modules[suite.function.partition(":")[0]], "__file__", None)
            digests[f"{name}.function"] = file_digest(Path(source)) if source else ""
    return digests
