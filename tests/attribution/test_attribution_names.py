import subprocess
import sys

import pytest

from posttrain import attribution


def test_every_public_name_can_be_imported() -> None:
    assert len(attribution.__all__) == len(set(attribution.__all__)) == len(attribution._HOMES)
    for name in attribution.__all__:
        assert getattr(attribution, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'owen'"):
        attribution.owen  # noqa: B018


def test_a_name_loads_no_library_before_it_is_used() -> None:
    program = """
import sys
from posttrain.attribution import tmc_shapley
print("sklearn" in sys.modules, "scipy" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
