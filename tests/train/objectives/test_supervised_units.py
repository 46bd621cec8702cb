"""`supervised_unit` marks the tokens on which the objective has a loss."""

from typing import Any

import pytest

from posttrain.train.data.encoding import encode
from posttrain.train.objectives.build import supervised_unit
from posttrain.train.objectives.registry import OBJECTIVES

TOKENS = sorted(name for name, spec in OBJECTIVES.items() if not spec.classifier)


@pytest.mark.parametrize(
    ("objective", "settings"),
    [*((name, {}) for name in TOKENS), ("orpo", {"likelihood": "completion"})],
)
def test_supervised_units_are_those_of_the_objective(
    prepare: Any, records_of_shape: Any, objective: str, settings: dict[str, Any]
) -> None:
    prepared = prepare(objective, settings, moved=False)
    shape = OBJECTIVES[objective].shape
    units, _ = encode(prepared.lm, records_of_shape(shape), prepared.objective.config.max_length, shape)
    assert [supervised_unit(prepared.objective.config, unit) for unit in units] == list(prepared.objective.units)


@pytest.mark.parametrize("objective", ["reward", "classification"])
def test_texts_with_one_result_have_no_supervised_token(prepare: Any, records_of_shape: Any, objective: str) -> None:
    """The objective reads the same texts and appends a token at which the result is computed."""
    prepared = prepare(objective, moved=False)
    shape = OBJECTIVES[objective].shape
    units, _ = encode(prepared.lm, records_of_shape(shape), 1024, shape)
    for unit, objective_unit in zip(units, prepared.objective.units, strict=True):
        marked_unit = supervised_unit(prepared.objective.config, unit)
        assert [sequence.ids for sequence in marked_unit] == [sequence.ids[:-1] for sequence in objective_unit]
        assert not any(any(sequence.supervised) for sequence in marked_unit)
