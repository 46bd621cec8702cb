"""The command `data synthesize`: kept and rejected records, custom steps, and the report of `data why`."""

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.main import main

SEEDS = [{"prompt": f"where is my {noun}", "completion": "delivery"} for noun in ("parcel", "coat", "shoe")]
TEXTS = ["has the letter from Paris come yet", "has the letter from Paris come  yet", "no", "Where is my parcel?"]


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code, output.out, output.err


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rejected_items_have_a_reason_and_kept_records_an_origin(
    endpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.answer = lambda messages: "\n".join(f"{n}. {text}" for n, text in enumerate(TEXTS, 1))
    seeds = tmp_path / "seeds.jsonl"
    seeds.write_text("".join(json.dumps(row) + "\n" for row in SEEDS), encoding="utf-8")
    arguments = [
        "data",
        "synthesize",
        seeds,
        tmp_path / "new.jsonl",
        "--endpoint",
        endpoint.url,
        "--model",
        "the-model",
    ]
    arguments += ["--method", "label_inputs", "--records", "1", "-w", tmp_path, "--max-tokens", "77"]
    code, out, err = call(capsys, *arguments, "--step", "length: {input: {min_words: 3}}", "--json")
    assert code == 0, err
    assert json.loads(out)["counts"]["read as lines"] == 1
    assert endpoint.requests[0]["max_tokens"] == 77
    assert "JSON array" in endpoint.requests[0]["messages"][0]["content"]
    (record,) = lines(tmp_path / "new.jsonl")
    assert (record["prompt"], record["completion"]) == (TEXTS[0], "delivery")
    rejections = [(row["step"], row["reason"]) for row in lines(tmp_path / "new.rejected.jsonl")]
    assert rejections == [*[("synthesize", "too similar")] * 2, ("length", "input too short")]

    code, out, err = call(
        capsys, "data", "add", tmp_path / "new.jsonl", "--name", "set", "-w", tmp_path, "--engine", "inline"
    )
    assert code == 0, err
    code, out, err = call(capsys, "data", "show", "set", "-w", tmp_path, "--json")
    output = json.loads(out)
    id = (output["records"] if isinstance(output, dict) else output)[0]["id"]
    code, out, err = call(capsys, "data", "why", id, "-w", tmp_path)
    assert "synthesize    label_inputs by the-model, from " in out
    assert all(seed in out for seed in record["meta"]["synthetic"]["seeds"])


@pytest.mark.parametrize("step", ["no-such-step", "length: {input: 3}", "minhash: {threshold: [}"])
def test_an_invalid_step_raises_before_any_work(step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "seeds.jsonl").write_text(json.dumps(SEEDS[0]) + "\n", encoding="utf-8")
    code, _, err = call(capsys, "data", "synthesize", tmp_path / "seeds.jsonl", tmp_path / "new.jsonl", "--step", step)
    assert code == 2
    assert "--step: " in err
    assert [path.name for path in tmp_path.iterdir()] == ["seeds.jsonl"]
