import subprocess
import sys

import pytest
from pydantic import ValidationError

from posttrain.store.errors import UserError
from posttrain.store.section import Section
from posttrain.train.objectives import config as settings
from posttrain.train.objectives.base import Objective
from posttrain.train.objectives.build import objective_class
from posttrain.train.objectives.registry import OBJECTIVES, objective_spec


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_name_has_a_class(name: str) -> None:
    assert issubclass(objective_class(name), Objective)
    assert callable(objective_class(name).formula)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_registry_is_consistent(name: str) -> None:
    result = objective_spec(name)
    assert result is OBJECTIVES[name]
    assert not result.mismatched or result.reference
    assert not result.reference or result.shape in ("pair", "labelled")
    assert result.summary
    assert "\n" not in result.summary
    assert all(field.description for field in result.config.model_fields.values())


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        objective_spec("dop")
    assert str(caught.value) == "train.objective: no objective `dop`; did you mean `dpo`?"


def test_the_registry_imports_no_torch() -> None:
    code = "import sys, posttrain.train.objectives.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (settings.DpoConfig, {"beta": 0.1, "label_smoothing": 0.0}),
        (settings.IpoConfig, {"beta": 0.1}),
        (settings.HingeConfig, {"beta": 0.1}),
        (settings.OrpoConfig, {"beta": 0.1, "likelihood": "text"}),
        (settings.SimpoConfig, {"beta": 0.1, "gamma": 0.5, "label_smoothing": 0.0}),
        (settings.CpoConfig, {"beta": 0.1, "label_smoothing": 0.0, "nll_weight": 1.0}),
        (settings.KtoConfig, {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}),
        (settings.RewardConfig, {"centring": 0.0}),
        (settings.DistillationConfig, {"divergence": "jensen_shannon", "beta": 0.5, "temperature": 1.0}),
    ],
)
def test_defaults_are_trls(section: type[Section], expected: dict[str, object]) -> None:
    assert section().model_dump(include=set(expected)) == expected


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (settings.DpoConfig, {"beta": 0}),
        (settings.DpoConfig, {"label_smoothing": 0.6}),
        (settings.RobustDpoConfig, {"label_smoothing": 0.5}),
        (settings.SimpoConfig, {"gamma": -1}),
        (settings.KtoConfig, {"desirable_weight": -1}),
        (settings.DistillationConfig, {"beta": 0}),
        (settings.DistillationConfig, {"beta": 1}),
        (settings.DistillationConfig, {"temperature": 0}),
        (settings.DistillationConfig, {"divergence": "backward"}),
        (settings.DistillationConfig, {"layers": []}),
    ],
)
def test_invalid_settings_are_refused(section: type[Section], values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        section(**values)
