"""The built-in stages fulfil the contract that docs/extending.md publishes."""

import pytest

from posttrain.loop.context import RoundContext
from posttrain.loop.stage import CachedWork
from posttrain.loop.stages.collect import SETS, CollectSet, _Sources
from posttrain.loop.stages.fetch import Fetch
from posttrain.testing.stages import StageContract


class TestFetch(StageContract):
    @pytest.fixture
    def stage(self) -> CachedWork:
        return Fetch("tiny")


class TestCollect(StageContract):
    @pytest.fixture(params=SETS)
    def stage(self, request: pytest.FixtureRequest, context: RoundContext) -> CachedWork:
        for name, label in (("pool", ""), ("test", "yes")):
            lines = [f"is {name} {number} right?,{label}" for number in range(4)]
            (context.workspace.root / f"{name}.csv").write_text("\n".join(["prompt,completion", *lines]) + "\n")
        return CollectSet(request.param, _Sources(context))
