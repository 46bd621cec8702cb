"""What is said of keys that are not there, and of values where a section should be."""

from typing import Any

import pytest
from pydantic import Field

from posttrain.store.errors import UserError
from posttrain.store.section import Section


class Inner(Section):
    decay: float | None = None
    name: str = ""


class Other(Section):
    name: str = ""
    rate_scale: float = 1.0
    inner: Inner | None = None


class Listed(Section):
    hidden: int = 0


class Whole(Section):
    seed: int = 0
    batch_size: int = 1
    first: Inner = Inner()
    second: Other = Other()
    parts: list[Listed] = Field([])
    by_key: dict[str, Listed] = Field({})


def message(values: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        Whole.read(values, "f")
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "suggestion"),
    [
        ({"sead": 1}, "seed"),
        ({"train_batch_size": 1}, "batch_size"),
        ({"second": {"rate": 1}}, "rate_scale"),
        ({"rate_scale": 1}, "second.rate_scale"),
        ({"second": {"decay": 1}}, "second.inner.decay"),
        ({"decay": 1}, "first.decay"),  # and not the one further down
        ({"parts": [{"hiden": 1}]}, "hidden"),
        ({"by_key": {"any": {"hiden": 1}}}, "hidden"),
    ],
)
def test_what_is_like_it_is_suggested(values: dict[str, Any], suggestion: str) -> None:
    assert message(values).endswith(f"; did you mean `{suggestion}`?")


@pytest.mark.parametrize(
    ("key", "why"), [("bf16", "nothing is like it"), ("name", "two are"), ("hidden", "no path leads to it")]
)
def test_nothing_far_off_is_suggested(key: str, why: str) -> None:
    assert message({key: 1}) == f"f: unknown key `{key}`", why


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"first": "quick"}, "`first` is a section: set one of its keys, such as first.decay"),
        ({"first": None}, "`first` is a section: set one of its keys, such as first.decay"),
        ({"second": {"inner": 0.99}}, "`second.inner` is a section: set one of its keys, such as second.inner.decay"),
        ({"parts": ["x"]}, "`parts.0` is a section: set one of its keys, such as parts.0.hidden"),
        ({"by_key": {"any": 1}}, "`by_key.any` is a section: set one of its keys, such as by_key.any.hidden"),
    ],
)
def test_a_value_where_a_section_should_be(values: dict[str, Any], says: str) -> None:
    assert message(values) == f"f: {says}"
