"""The verb: what is kept, what is not and why, by steps of one's own, and what `data why` tells of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.main import main

SEEDS = [{"prompt": f"where is my {what}", "completion": "delivery"} for what in ("parcel", "coat", "shoe")]
WRITTEN = ["has the letter from Paris come yet", "has the letter from Paris come  yet", "no", "Where is my parcel?"]


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, printed.out, printed.err


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_what_goes_is_kept_with_its_reason_and_what_stays_tells_where_it_is_from(
    endpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.answer = lambda messages: "\n".join(f"{n}. {text}" for n, text in enumerate(WRITTEN, 1))
    seeds = tmp_path / "seeds.jsonl"
    seeds.write_text("".join(json.dumps(row) + "\n" for row in SEEDS), encoding="utf-8")
    asked = ["data", "synthesize", seeds, tmp_path / "new.jsonl", "--endpoint", endpoint.url, "--model", "the-model"]
    asked += ["--method", "label_inputs", "--records", "1", "-w", tmp_path, "--max-tokens", "77"]
    code, out, err = call(capsys, *asked, "--step", "length: {input: {min_words: 3}}", "--json")
    assert code == 0, err
    assert json.loads(out)["counts"]["read as lines"] == 1
    assert endpoint.asked[0]["max_tokens"] == 77
    assert "JSON array" in endpoint.asked[0]["messages"][0]["content"]
    (kept,) = lines(tmp_path / "new.jsonl")
    assert (kept["prompt"], kept["completion"]) == (WRITTEN[0], "delivery")
    rejected = [(row["step"], row["reason"]) for row in lines(tmp_path / "new.rejected.jsonl")]
    assert rejected == [*[("synthesize", "too similar")] * 2, ("length", "input too short")]

    code, out, err = call(
        capsys, "data", "add", tmp_path / "new.jsonl", "--name", "set", "-w", tmp_path, "--engine", "inline"
    )
    assert code == 0, err
    code, out, err = call(capsys, "data", "show", "set", "-w", tmp_path, "--json")
    shown = json.loads(out)
    id = (shown["records"] if isinstance(shown, dict) else shown)[0]["id"]
    code, out, err = call(capsys, "data", "why", id, "-w", tmp_path)
    assert "synthesize    label_inputs by the-model, from " in out
    assert all(seed in out for seed in kept["meta"]["synthetic"]["seeds"])


@pytest.mark.parametrize("step", ["no-such-step", "length: {input: 3}", "minhash: {threshold: [}"])
def test_a_mistaken_step_is_said_before_any_work(step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "seeds.jsonl").write_text(json.dumps(SEEDS[0]) + "\n", encoding="utf-8")
    code, _, err = call(capsys, "data", "synthesize", tmp_path / "seeds.jsonl", tmp_path / "new.jsonl", "--step", step)
    assert code == 2
    assert "--step: " in err
    assert [path.name for path in tmp_path.iterdir()] == ["seeds.jsonl"]
