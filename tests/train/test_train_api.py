"""``posttrain.train.train``: ``posttrain train`` in Python."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import posttrain.train
from posttrain.store.errors import UserError

SMALL = {"train": {"epochs": 2, "batch_size": 2}}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        {"prompt": "my card is gone", "chosen": "card lost", "rejected": "refund"},
        {"prompt": "where is my money", "chosen": "refund", "rejected": "card lost"},
        {"prompt": "i was charged twice", "chosen": "refund", "rejected": "top up"},
        {"prompt": "how do i top up", "chosen": "top up", "rejected": "refund"},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.mark.slow
def test_train_writes_a_model_its_config_and_its_steps(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    summary = posttrain.train.train("tiny", "pairs.jsonl", "out", objective="dpo", settings=SMALL)
    AutoModelForCausalLM.from_pretrained("out")
    config = yaml.safe_load(Path("out/config.yaml").read_text())
    assert (config["train"]["objective"], config["train"]["epochs"], config["data"]) == ("dpo", 2, str(data))
    steps = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert summary == json.loads(Path("out/summary.json").read_bytes())
    assert posttrain.train.train("tiny", data, tmp_path / "out", objective="dpo", settings=SMALL) == summary
    with pytest.raises(UserError, match="`seed` was 17 and is 3"):
        posttrain.train.train("tiny", data, "out", objective="dpo", settings={**SMALL, "seed": 3})


@pytest.mark.slow
def test_records_are_read_from_a_url_and_a_missing_one_leaves_nothing(
    data: Path, tmp_path: Path, s3_server: str
) -> None:
    import boto3

    boto3.client("s3").upload_file(str(data), "posttrain", "api/pairs.jsonl")
    summary = posttrain.train.train("tiny", "s3://posttrain/api/pairs.jsonl", tmp_path / "remote", settings=SMALL)
    assert summary == posttrain.train.train("tiny", data, tmp_path / "local", settings=SMALL)
    with pytest.raises(UserError, match=r"^s3://posttrain/api/none\.jsonl: there is no such file; check the URL$"):
        posttrain.train.train("tiny", "s3://posttrain/api/none.jsonl", tmp_path / "none", settings=SMALL)
    assert not (tmp_path / "none").exists()


def test_an_explicit_objective_overrides_the_settings(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[Any] = []
    monkeypatch.setattr(
        "posttrain.train.api.train_standalone", lambda out, config, *arguments, **options: configs.append(config)
    )
    settings = {"train": {"objective": "ipo"}}
    for objective in (None, "dpo"):
        posttrain.train.train("tiny", data, tmp_path / "out", objective=objective, settings=settings)
    posttrain.train.train("tiny", data, tmp_path / "out")
    assert [config.train.objective for config in configs] == ["ipo", "dpo", "sft"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"train": {"epoch": 2}}}, "settings: unknown key `train.epoch`; did you mean `epochs`?"),
        ({"settings": {"trian": {}}}, "unknown key `trian`"),
        ({"objective": "dpa"}, "objective: no objective `dpa`"),
        ({"model": "nothing/here/at/all"}, "is no model"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl: there is no such file"),
    ],
)
def test_mistakes_are_reported_before_any_output(
    data: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    arguments = {"model": "tiny", "data": data, "out": tmp_path / "out", **changes}
    with pytest.raises(UserError) as caught:
        posttrain.train.train(**arguments)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()
