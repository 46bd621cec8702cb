"""``posttrain train --profile`` and ``--autotune``, and ``posttrain report --training``."""

import gzip
import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.train.trial import Settings, Trial

Call = Callable[..., Any]

SMALL = ("--model", "tiny", "--set", "train.epochs=2", "--set", "train.batch_size=2")


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    rows = [("my card is gone", "card lost"), ("where is my money", "refund"), ("how do i top up", "top up")]
    path.write_text("".join(json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in rows))
    return path


@pytest.fixture
def measured_settings(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that autotune measured; a fake machine is fastest with micro-batches of 4096 tokens."""
    trials: list[Settings] = []

    class Machine:
        def __init__(self, *arguments: Any) -> None:
            pass

        def __call__(self, settings: Settings, floor: float, seconds: float) -> Trial:
            trials.append(settings)
            rate = 1e3 if settings["micro_batch_tokens"] == 4096 and not settings["compile"] else 1e2
            return Trial(settings, (rate, rate), 6000, memory_bytes=10)

    monkeypatch.setattr("posttrain.train.autotune.TrialRunner", Machine)
    return trials


@pytest.mark.slow
def test_a_profile_is_written_beside_the_model(answers: Path, tmp_path: Path, posttrain: Call) -> None:
    out = tmp_path / "out"
    outcome = posttrain("train", *SMALL, "--data", answers, "--out", out, "--profile")
    assert outcome.code == 0, outcome
    text = (out / "profile" / "profile.txt").read_text()
    assert "Self CPU time total" in text
    assert "profile.txt" in outcome.err
    assert json.loads(gzip.decompress((out / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    plain = posttrain("train", *SMALL, "--data", answers, "--out", tmp_path / "plain")
    assert plain.code == 0
    assert not (tmp_path / "plain" / "profile").exists()
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_each_step_logs_its_measurements(answers: Path, tmp_path: Path, posttrain: Call) -> None:
    out = tmp_path / "out"
    assert posttrain("train", *SMALL, "--data", answers, "--out", out).code == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert 0 < line["update_ratio"] < 1
        assert 0 <= line["data_wait"] <= 1
        assert line["data_rate"] > 0
        assert 0 < line["mfu"] < 1
        assert all(norm > 0 for norm in line["group_norms"].values())
        total = sum(norm**2 for norm in line["group_norms"].values()) ** 0.5
        assert total == pytest.approx(line["grad_norm"], rel=1e-3), "the groups make up the whole gradient"
        assert {"forward", "backward", "optimizer"} <= line["phases"].keys()
        assert sum(line["phases"].values()) <= line["seconds"] * 1.05


@pytest.mark.slow
def test_autotune_writes_the_fastest_settings_and_training_uses_them(
    answers: Path, tmp_path: Path, posttrain: Call, measured_settings: list[Settings]
) -> None:
    out = tmp_path / "out"
    command = ("train", *SMALL, "--set", "train.micro_batch_tokens=2048", "--data", answers, "--out", out)
    outcome = posttrain(*command, "--autotune", "--autotune-seconds", "20")
    assert outcome.code == 0, outcome
    assert "1,000 tokens/s, before 100" in outcome.out
    assert "--set train.micro_batch_tokens=4096" in outcome.out
    assert measured_settings
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["train"]["micro_batch_tokens"] == 4096
    assert config["train"]["epochs"] == 2
    assert not (out / "model.safetensors").exists()
    # Autotune may run again in its folder; then the command that it printed trains there.
    assert posttrain(*command, "--autotune").code == 0
    outcome = posttrain("train", "--config", out / "config.yaml", "--out", out)
    assert outcome.code == 0, outcome
    assert (out / "model.safetensors").exists()
    outcome = posttrain(*command, "--autotune")
    assert "holds something else already" in outcome.mistake


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--autotune-seconds", "60"), "--autotune-seconds: there is nothing to spend them on; add --autotune"),
        (("--autotune", "--autotune-seconds", "1"), "--autotune-seconds"),
        (("--autotune", "--profile"), "--autotune: finds settings and does nothing else"),
        (("--autotune", "--inspect", "1"), "--autotune: finds settings and does nothing else"),
    ],
)
def test_conflicting_options_are_refused(
    answers: Path, tmp_path: Path, posttrain: Call, options: tuple[str, ...], message: str
) -> None:
    outcome = posttrain("train", *SMALL, "--data", answers, "--out", tmp_path / "out", *options)
    assert message in outcome.mistake
    assert not (tmp_path / "out").exists()


def test_the_page_of_a_training_is_self_contained(answers: Path, tmp_path: Path, posttrain: Call) -> None:
    out, page = tmp_path / "out", tmp_path / "page.html"
    assert posttrain("train", *SMALL, "--data", answers, "--out", out).code == 0
    outcome = posttrain("report", page, "--training", out)
    assert (outcome.code, f"wrote {page}" in outcome.out) == (0, True)
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "tokens per second by step" in text
    # The library names addresses in messages and namespaces; what the page itself holds loads nothing.
    own = re.sub("<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "http" not in own.replace("http-equiv", "")
    assert "default-src 'none'" in html.unescape(own)


@pytest.mark.parametrize(
    ("page", "folder", "message"),
    [
        ("page.html", ".", "there is no metrics.jsonl in it"),
        ("page.svg", ".", "a report is HTML"),
        ("nowhere/page.html", ".", "there is no such folder"),
    ],
)
def test_unusable_pages_and_folders_are_refused(
    tmp_path: Path, posttrain: Call, page: str, folder: str, message: str
) -> None:
    outcome = posttrain("report", tmp_path / page, "--training", tmp_path / folder)
    assert message in outcome.mistake
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_autotune_says_when_nothing_is_better(
    measured_settings: list[Settings], answers: Path, tmp_path: Path, posttrain: Call
) -> None:
    best = ("--set", "train.micro_batch_tokens=4096")
    outcome = posttrain("train", *SMALL, *best, "--data", answers, "--out", tmp_path / "out", "--autotune")
    assert outcome.code == 0, outcome
    assert outcome.out.startswith("nothing better than your settings in ")
