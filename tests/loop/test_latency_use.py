"""Latency is timed only where somebody asks for it."""

from typing import Any

import pytest
import yaml

from posttrain.loop.config import load_config


@pytest.mark.parametrize(
    ("changes", "prompts"),
    [
        ({}, 0),
        ({"gate": {"deploy": ["latency_p99 <= champion.latency_p99 * 1.1"]}}, 32),
        ({"gate": {"rollback": ["baseline.latency_p50 < latency_p50 / 2"]}}, 32),
        ({"adjust": [{"latency_p50 > 1": "train.epochs + 1"}]}, 32),
        ({"evaluate": {"latency": {"repeats": 3}}}, 32),
        ({"evaluate": {"latency": {"prompts": 4}}}, 4),
    ],
)
def test_latency_is_timed_where_a_rule_uses_it_or_its_section_is_set(
    small: Any, changes: dict[str, Any], prompts: int
) -> None:
    root = small()
    values = yaml.safe_load((root / "posttrain.yaml").read_text())
    del values["evaluate"]["latency"]
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    (root / "posttrain.yaml").write_text(yaml.safe_dump(values))
    assert load_config(root).evaluate.latency.prompts == prompts
