"""``posttrain select adversarial``: its output, and the messages of mistakes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.data.reading.reader import read
from posttrain.data.records.record import concat
from posttrain.loop.config import load_config
from posttrain.models.embedder import Embedder
from posttrain.models.language_model import load_language_model
from posttrain.models.likelihood import label_scores
from posttrain.models.task import record_turns

Call = Callable[..., Any]
LOOSE = ["--similarity", "0.2", "--swaps", "6", "--n", "2", "--budget", "600"]


@pytest.mark.slow
def test_the_model_is_wrong_on_the_written_examples(finished_copy: Path, posttrain: Call, tmp_path: Path) -> None:
    out = tmp_path / "adversarial.jsonl"
    command = ["select", "adversarial", "-w", finished_copy, *LOOSE, "--out", out]
    result = posttrain(*command, "--json").json
    assert result["counts"]["kept"] == len(result["examples"]) > 0
    config = load_config(finished_copy)
    records = concat(list(read(out, config.data.columns)))
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    lm = load_language_model((finished_copy / ".posttrain" / "champion").resolve(), config.task)
    labels = config.task.label_set
    rows = records.to_pylist()
    scores = label_scores(lm, [record_turns(row) for row in rows], labels).log_probabilities
    embeddings = Embedder.load("minilm").embed(
        [line["text"] for line in lines] + [entry["original_text"] for entry in lines]
    )
    for row, (record, line) in enumerate(zip(rows, lines, strict=True)):
        assert labels[scores[row].argmax()] == line["answer_after"] != line["answer_before"]
        assert record["completion"] == line["label"] == line["answer_before"]
        assert json.loads(record["meta"])["original"] == line["original"]
        assert -scores[row, labels.index(line["label"])] == pytest.approx(line["loss_after"], abs=0.02)
        assert embeddings[row] @ embeddings[len(lines) + row] == pytest.approx(line["similarity"], abs=1e-3)
        assert line["similarity"] >= 0.2
    assert "the file exists already" in posttrain(*command).mistake
    assert posttrain("data", "add", out, "-w", finished_copy).code == 0
    assert posttrain("data", "add", out, "--to", "labelled", "-w", finished_copy).code == 0
    assert posttrain("config", "check", "-w", finished_copy).code == 0


def test_evaluation_records_are_used_only_on_request(finished_copy: Path, posttrain: Call) -> None:
    command = ["select", "adversarial", "-w", finished_copy, *LOOSE, "--method", "fgsm"]
    assert "no labelled records to start from" in posttrain(*command, "--records", finished_copy / "test.csv").mistake
    output = posttrain(*command, "--suite", "test")
    assert output.code == 0
    assert "train on none" in output.out or "0 kept" in output.out


def test_the_output_says_how_to_use_the_examples(finished_copy: Path, posttrain: Call, tmp_path: Path) -> None:
    out = tmp_path / "examples.jsonl"
    command = ["select", "adversarial", "-w", finished_copy, *LOOSE, "--method", "fgsm"]
    output = posttrain(*command, "--records", finished_copy / "answers.csv", "--out", out)
    assert f"to learn from them with the old answers: posttrain data add {out} --to labelled" in output.out
    assert "records were left out: models are measured on them" in output.out


def test_unusable_arguments_of_adversarial_are_refused_in_one_line(
    small: Any, finished_copy: Path, posttrain: Call, tmp_path: Path
) -> None:
    def mistake(*arguments: object) -> str:
        return str(posttrain("select", "adversarial", "-w", finished_copy, *arguments).mistake)

    assert "no method `fgms`; did you mean `fgsm`?" in mistake("--method", "fgms")
    assert "--n" in mistake("--n", "0")
    assert "no suite `tests`; did you mean `test`?" in mistake("--suite", "tests")
    assert "leave out --suite or --records" in mistake("--suite", "test", "--records", "x.csv")
    assert "nothing.csv" in mistake("--records", "nothing.csv")
    assert "use .jsonl" in mistake("--out", tmp_path / "examples.csv")
    assert "there is no such folder" in mistake("--out", tmp_path / "no" / "examples.jsonl")
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("text,label\nnone of it is known,nothing\n", encoding="utf-8")
    assert "label `nothing` is not in task.labels" in mistake("--records", wrong)
    fresh = small("fresh")
    assert "there is no champion yet" in posttrain("select", "adversarial", "-w", fresh).mistake
    assert posttrain("run", "-w", fresh, "--rounds", "0").code == 0
    assert "no labelled records to start from" in posttrain("select", "adversarial", "-w", fresh).mistake
    config = yaml.safe_load((fresh / "posttrain.yaml").read_text(encoding="utf-8"))
    config["evaluate"]["suites"] = {"fluency": {"scorer": "perplexity"}}
    config["gate"] = {"deploy": ["perplexity <= champion.perplexity"]}
    (fresh / "posttrain.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert "calls no answer right" in posttrain("select", "adversarial", "-w", fresh).mistake
