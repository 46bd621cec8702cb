"""Every engine gives the same results in the same order, and says what went wrong."""

import os
from collections.abc import Iterator

import pytest

from posttrain.jobs.engine import Engine, open_engine
from posttrain.store.errors import UserError, WorkError


def square(number: int) -> int:
    return number * number


def refuse_three(number: int) -> int:
    if number == 3:
        raise UserError("three is not wanted", where=f"item:{number}", fix="leave it out")
    return number


def die(number: int) -> int:
    os._exit(9)


class EngineContract:
    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        raise NotImplementedError

    def test_results_come_in_order(self, engine: Engine) -> None:
        assert list(engine.map(square, range(20))) == [number * number for number in range(20)]

    def test_nothing_in_nothing_out(self, engine: Engine) -> None:
        assert list(engine.map(square, [])) == []

    def test_an_error_arrives_as_it_was_raised(self, engine: Engine) -> None:
        with pytest.raises(UserError, match=r"^item:3: three is not wanted; leave it out$") as caught:
            list(engine.map(refuse_three, range(6)))
        assert caught.value.where == "item:3"
        assert list(engine.map(square, [5])) == [25], "and the engine goes on"


class TestInline(EngineContract):
    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        with open_engine("inline") as engine:
            yield engine


class TestProcesses(EngineContract):
    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        with open_engine("processes", 2) as engine:
            yield engine

    def test_a_killed_worker_is_said(self) -> None:
        with open_engine("processes", 1) as engine, pytest.raises(WorkError, match="worker process was killed"):
            list(engine.map(die, [1, 2]))


class TestRay(EngineContract):
    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        with open_engine("ray", 2) as engine:
            yield engine


def test_a_wrong_engine_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="there is no engine `spark`"):
        open_engine("spark")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="0 workers"):
        open_engine("processes", 0)
