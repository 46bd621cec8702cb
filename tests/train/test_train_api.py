"""``posttrain.train``: ``posttrain train`` in Python."""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import yaml
from hub_server import Hub

import posttrain
from posttrain.store.errors import UserError

PAIRS = [
    {"prompt": "my card is gone", "chosen": "card lost", "rejected": "refund"},
    {"prompt": "where is my money", "chosen": "refund", "rejected": "card lost"},
    {"prompt": "i was charged twice", "chosen": "refund", "rejected": "top up"},
    {"prompt": "how do i top up", "chosen": "top up", "rejected": "refund"},
]

SMALL = {"train": {"epochs": 2, "batch_size": 2, "precision": "float32"}}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PAIRS), encoding="utf-8")
    return file


@pytest.mark.slow
def test_train_writes_a_model_its_config_and_its_steps(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    result = posttrain.train("tiny", "pairs.jsonl", "out", objective="dpo", settings=SMALL)
    AutoModelForCausalLM.from_pretrained("out")
    config = yaml.safe_load(Path("out/config.yaml").read_text())
    assert (config["train"]["objective"]["name"], config["train"]["epochs"], config["data"]) == ("dpo", 2, str(data))
    steps = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert (result.folder, result.steps, result.finished) == (tmp_path / "out", 4, True)
    assert result.summary == json.loads(Path("out/summary.json").read_bytes())
    assert result.metrics == steps
    name = re.escape(str(tmp_path / "out"))
    assert re.fullmatch(rf"TrainResult\('{name}', 4 steps, loss 0\.\d{{4}} to 0\.\d{{4}}\)", repr(result))
    again = posttrain.train("tiny", data, tmp_path / "out", objective="dpo", settings=SMALL)
    assert again.summary == result.summary
    with pytest.raises(UserError, match="`seed` was 17 and is 3"):
        posttrain.train("tiny", data, "out", objective="dpo", settings={**SMALL, "seed": 3})


@pytest.mark.slow
def test_records_are_read_from_a_url_and_a_missing_one_leaves_nothing(
    data: Path, tmp_path: Path, s3_server: str
) -> None:
    import boto3

    boto3.client("s3").upload_file(str(data), "posttrain", "api/pairs.jsonl")
    remote = posttrain.train("tiny", "s3://posttrain/api/pairs.jsonl", tmp_path / "remote", settings=SMALL)
    assert remote.summary == posttrain.train("tiny", data, tmp_path / "local", settings=SMALL).summary
    with pytest.raises(UserError, match=r"^s3://posttrain/api/none\.jsonl: there is no such file; check the URL$"):
        posttrain.train("tiny", "s3://posttrain/api/none.jsonl", tmp_path / "none", settings=SMALL)
    assert not (tmp_path / "none").exists()


def test_an_explicit_objective_overrides_the_settings(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[Any] = []

    def note(out: Path, config: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        configs.append(config)
        return {"steps": 0}

    monkeypatch.setattr("posttrain.train.api.train_standalone", note)
    settings = {"train": {"objective": "ipo"}}
    for objective in (None, "dpo"):
        posttrain.train("tiny", data, tmp_path / "out", objective=objective, settings=settings)
    posttrain.train("tiny", data, tmp_path / "out")
    settings = {"train": {"objective": {"beta": 0.3}}}
    posttrain.train("tiny", data, tmp_path / "out", objective="ipo", settings=settings)
    assert [config.train.objective.name for config in configs] == ["ipo", "dpo", "sft", "ipo"]
    assert configs[-1].train.objective.beta == 0.3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"train": {"epoch": 2}}}, "settings: unknown key `train.epoch`; did you mean `train.epochs`?"),
        ({"settings": {"trian": {}}}, "unknown key `trian`"),
        ({"objective": "dpa"}, "objective: no objective `dpa`"),
        ({"model": "nothing/here/at/all"}, "is not a model"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl: there is no such file"),
        (
            {"data": "hub:nobody/nothing"},
            "hub:nobody/nothing: the Hub cannot be reached (HF_HUB_OFFLINE is set); ",
        ),
        ({"data": []}, "data: holds no records; put records into it, or name a file"),
        ({"data": [PAIRS[0], {"text": "a"}]}, "data[1]: has the shape `text`, but data[0] has the shape `preference`"),
        ({"data": [PAIRS, [PAIRS[0], 3]]}, "data[1][1]: a record must be a dictionary, not int"),
        ({"data": [{"prompt": "a", "completion": "b"}, {"prompt": "a"}]}, "data[1]: record "),
        ({"callbacks": [3]}, "callbacks[0]: 3 is not a callback; give a function of a step, or an object with "),
        ({"callbacks": [print, dict]}, "callbacks[1]: dict is a class; give a function of a step, or an object with "),
    ],
)
def test_mistakes_are_reported_before_any_output(
    data: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    arguments = {"model": "tiny", "data": data, "out": tmp_path / "out", **changes}
    with pytest.raises(UserError) as caught:
        posttrain.train(**arguments)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_the_same_records_train_the_same_model_wherever_they_come_from(data: Path, tmp_path: Path) -> None:
    import pandas as pd

    sources = {
        "file": data,
        "table": pa.Table.from_pylist(PAIRS),
        "frame": pd.DataFrame(PAIRS, index=[3, 1, 2, 0]),
        "several": [PAIRS[:1], pd.DataFrame(PAIRS[1:2]), iter(PAIRS[2:])],
    }
    results = {
        name: posttrain.train("tiny", source, tmp_path / name, objective="dpo", settings=SMALL)
        for name, source in sources.items()
    }
    assert len({weights(result.folder) for result in results.values()}) == 1
    assert len({json.dumps(result.summary) for result in results.values()}) == 1


@pytest.mark.slow
def test_sources_in_memory_are_mixed_as_files_are(tmp_path: Path) -> None:
    phase = {"epochs": 2, "mix": {"data[0]": 3, "data[1]": 1}}
    settings = {"train": {"batch_size": 2, "phases": [phase]}}
    summary = posttrain.train("tiny", [PAIRS[:2], PAIRS[2:]], tmp_path / "out", settings=settings).summary
    assert set(summary["mixes"][0]["kinds"]) == {"data[0]", "data[1]"}


@pytest.mark.slow
def test_records_that_changed_are_recognised_by_their_content(data: Path, tmp_path: Path) -> None:
    stop = posttrain.train("tiny", PAIRS, tmp_path / "out", settings=SMALL, callbacks=[lambda step: True])
    assert (stop.steps, stop.finished) == (1, False)
    changed = [*PAIRS[:3], {**PAIRS[3], "chosen": "top up now"}]
    with pytest.raises(UserError, match="the content of the data has changed"):
        posttrain.train("tiny", changed, tmp_path / "out", settings=SMALL)
    # The same content from a file is not a change.
    assert posttrain.train("tiny", data, tmp_path / "out", settings=SMALL).steps == 4


@pytest.mark.slow
def test_a_result_loads_a_model_that_generates(data: Path, tmp_path: Path) -> None:
    model, tokenizer = posttrain.train("tiny", data, tmp_path / "out", objective="dpo", settings=SMALL).load()
    turns = [{"role": "user", "content": "my card is gone"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt["input_ids"].shape[1]
    rewards, _ = posttrain.train("tiny", data, tmp_path / "rewards", objective="reward", settings=SMALL).load()
    assert type(rewards).__name__.endswith("ForSequenceClassification")
    assert rewards(**prompt).logits.shape == (1, 1)


def test_importing_posttrain_imports_neither_torch_nor_the_config() -> None:
    code = "import posttrain, sys; assert not {'torch', 'pydantic', 'pyarrow'} & set(sys.modules); dir(posttrain)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    # The package of this name takes the place of the function: it can be called all the same.
    code = "import posttrain.train.config; from posttrain import train; assert callable(train), train"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_dataset_of_the_hub_trains_as_its_records_do(hub: Hub, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(PAIRS), buffer)
    hub.datasets["me/pairs"] = {"default/train/0000.parquet": buffer.getvalue()}
    remote = posttrain.train("tiny", "hub:me/pairs", tmp_path / "remote", objective="dpo", settings=SMALL)
    local = posttrain.train("tiny", PAIRS, tmp_path / "local", objective="dpo", settings=SMALL)
    assert weights(remote.folder) == weights(local.folder)
    assert yaml.safe_load((tmp_path / "remote" / "config.yaml").read_text())["data"] == "hub:me/pairs"


@pytest.mark.slow
def test_a_callback_may_change_the_current_folder(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    move = lambda step: os.chdir(tmp_path / "elsewhere")  # noqa: E731
    result = posttrain.train("tiny", data.name, "out", objective="dpo", settings=SMALL, callbacks=move)
    assert result.folder == tmp_path / "out"
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not any((tmp_path / "elsewhere").iterdir())


def test_held_out_records_come_from_a_file_or_from_memory(tmp_path: Path) -> None:
    rows = [{"prompt": f"message {number}", "completion": "yes" if number % 2 else "no"} for number in range(6)]
    file = tmp_path / "held-out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[4:]), encoding="utf-8")
    settings = {"train": {"max_steps": 2, "batch_size": 2}}

    def run(held_out: Any) -> Any:
        return posttrain.train("tiny", rows[:4], tmp_path / "out", settings=settings, held_out=held_out)

    result = run(rows[4:])
    assert result.metrics[-1]["evaluation"].keys() == {"loss"}
    # The same records from a file: the training is done.
    assert run(file).summary == result.summary
    with pytest.raises(UserError, match="the content of the held-out data has changed"):
        run(rows[5:])
    with pytest.raises(UserError, match=r"held_out\[1\]"):
        posttrain.train("tiny", rows[:4], tmp_path / "other", settings=settings, held_out=[rows[4], {"prompt": "hi"}])
    assert not (tmp_path / "other").exists()
