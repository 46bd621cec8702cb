"""``posttrain train --profile`` and ``--autotune``, and ``posttrain report --training``."""

import gzip
import json
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
    path.write_text("".join(json.dumps({"prompt": asked, "completion": answer}) + "\n" for asked, answer in rows))
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that were measured, by a machine that likes 4096 tokens at once."""
    asked: list[Settings] = []

    class Machine:
        def __init__(self, *arguments: Any) -> None:
            pass

        def __call__(self, settings: Settings, floor: float, seconds: float) -> Trial:
            asked.append(settings)
            rate = 1e3 if settings["micro_batch_tokens"] == 4096 and not settings["compile"] else 1e2
            return Trial(settings, (rate, rate), 6000, memory_bytes=10)

    monkeypatch.setattr("posttrain.train.autotune.TrialRunner", Machine)
    return asked


@pytest.mark.slow
def test_a_profile_beside_the_model(answers: Path, tmp_path: Path, posttrain: Call) -> None:
    out = tmp_path / "out"
    ended = posttrain("train", *SMALL, "--data", answers, "--out", out, "--profile")
    assert ended.code == 0, ended
    text = (out / "profile" / "profile.txt").read_text()
    assert "forward: linear layers" in text
    assert "output head and loss" in text
    assert "optimiser" in text
    assert text.splitlines()[0] in ended.err
    assert json.loads(gzip.decompress((out / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    plain = posttrain("train", *SMALL, "--data", answers, "--out", tmp_path / "plain")
    assert plain.code == 0
    assert not (tmp_path / "plain" / "profile").exists()
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_what_a_step_measures_is_in_its_line(answers: Path, tmp_path: Path, posttrain: Call) -> None:
    out = tmp_path / "out"
    assert posttrain("train", *SMALL, "--data", answers, "--out", out).code == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert 0 < line["update_ratio"] < 1
        assert 0 <= line["data_wait"] <= 1
        assert 0 < line["mfu"] < 1
        assert all(norm > 0 for norm in line["group_norms"].values())
        total = sum(norm**2 for norm in line["group_norms"].values()) ** 0.5
        assert total == pytest.approx(line["grad_norm"], rel=1e-3), "the groups are all of the gradient"
        assert {"forward", "backward", "optimizer"} <= line["phases"].keys()
        assert sum(line["phases"].values()) <= line["seconds"] * 1.05


def test_settings_are_found_written_and_trained_with(
    answers: Path, tmp_path: Path, posttrain: Call, measured: list[Settings]
) -> None:
    out = tmp_path / "out"
    begun = ("train", *SMALL, "--set", "train.micro_batch_tokens=2048", "--data", answers, "--out", out)
    ended = posttrain(*begun, "--autotune", "--autotune-seconds", "20")
    assert ended.code == 0, ended
    assert "1,000 tokens/s, before 100" in ended.out
    assert "--set train.micro_batch_tokens=4096" in ended.out
    assert measured
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["train"]["micro_batch_tokens"] == 4096
    assert config["train"]["epochs"] == 2
    assert not (out / "model.safetensors").exists()
    # Again, as nothing but a tuning is there; and then the command that it printed.
    assert posttrain(*begun, "--autotune").code == 0
    ended = posttrain("train", "--config", out / "config.yaml", "--out", out)
    assert ended.code == 0, ended
    assert (out / "model.safetensors").exists()
    ended = posttrain(*begun, "--autotune")
    assert "holds something else already" in ended.mistake


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--autotune-seconds", "60"), "--autotune-seconds: there is nothing to spend them on; add --autotune"),
        (("--autotune", "--autotune-seconds", "1"), "--autotune-seconds"),
        (("--autotune", "--profile"), "--autotune: finds settings and does nothing else"),
        (("--autotune", "--inspect", "1"), "--autotune: finds settings and does nothing else"),
    ],
)
def test_options_that_do_not_go_together(
    answers: Path, tmp_path: Path, posttrain: Call, options: tuple[str, ...], says: str
) -> None:
    ended = posttrain("train", *SMALL, "--data", answers, "--out", tmp_path / "out", *options)
    assert says in ended.mistake
    assert not (tmp_path / "out").exists()


def test_the_page_of_a_training(answers: Path, tmp_path: Path, posttrain: Call) -> None:
    out, page = tmp_path / "out", tmp_path / "page.html"
    assert posttrain("train", *SMALL, "--data", answers, "--out", out).code == 0
    ended = posttrain("report", page, "--training", out)
    assert (ended.code, f"wrote {page}" in ended.out) == (0, True)
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "tokens a second by step" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("page", "folder", "says"),
    [
        ("page.html", ".", "there is no metrics.jsonl in it"),
        ("page.svg", ".", "the page of a training is HTML"),
        ("nowhere/page.html", ".", "there is no such folder"),
    ],
)
def test_a_page_that_cannot_be_made(tmp_path: Path, posttrain: Call, page: str, folder: str, says: str) -> None:
    ended = posttrain("report", tmp_path / page, "--training", tmp_path / folder)
    assert says in ended.mistake
    assert list(tmp_path.iterdir()) == []
