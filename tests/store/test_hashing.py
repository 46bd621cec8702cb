import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.store.hashing import canonical_json, digest, file_digest

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def shuffle_keys(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        items = [(key, shuffle_keys(inner, rng)) for key, inner in value.items()]
        rng.shuffle(items)
        return dict(items)
    return [shuffle_keys(inner, rng) for inner in value] if isinstance(value, list) else value


@given(VALUES, st.randoms(use_true_random=False))
def test_key_order_does_not_matter(value: Any, rng: random.Random) -> None:
    assert digest(shuffle_keys(value, rng)) == digest(value)


@given(VALUES)
def test_canonical_json_keeps_the_whole_value(value: Any) -> None:
    assert json.loads(canonical_json(value)) == value


@given(VALUES, VALUES)
def test_different_values_have_different_digests(first: Any, second: Any) -> None:
    # 1, 1.0 and True are equal in Python and different in JSON.
    assert (digest(first) == digest(second)) == (sorted_repr(first) == sorted_repr(second))


def sorted_repr(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{sorted_repr(value[key])}" for key in sorted(value)) + "}"
    return "[" + ",".join(map(sorted_repr, value)) + "]" if isinstance(value, list) else repr(value)


def test_the_canonical_form() -> None:
    assert canonical_json({"b": (1, 2.5), "a": "é"}) == b'{"a":"\\u00e9","b":[1,2.5]}'
    assert digest({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [{"b": np.int64(1)}]}, "value.a[0].b: int64"),
        ({"a": {1: "x"}}, "value.a: key 1"),
        ({"a": Path("x")}, "value.a: "),
        ([{1, 2}], "value[0]: set"),
    ],
)
def test_values_without_a_json_form_raise_with_their_path(value: Any, message: str) -> None:
    with pytest.raises(TypeError) as error:
        canonical_json(value)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_raise(number: float) -> None:
    with pytest.raises(ValueError, match=r"value\.loss"):
        canonical_json({"loss": number})


def test_file_digest(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_digest(tmp_path / "file") == expected
