"""Parts are found by built-in name, by entry point and by dotted path, and imported only on use."""

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from posttrain.store import extensions
from posttrain.store.errors import UserError
from posttrain.store.extensions import Registry


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[Any]:
    (tmp_path / "other_package.py").write_text(
        "from abc import ABC, abstractmethod\nfrom collections import OrderedDict\n"
        "class Square(OrderedDict): pass\nnumber = 3\n"
        "class Half(ABC, dict):\n    area = sides = abstractmethod(lambda self: 0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "other_package", raising=False)
    points = [
        EntryPoint("square", "other_package:Square", "posttrain.shapes"),
        EntryPoint("dict", "other_package:number", "posttrain.shapes"),
        EntryPoint("lost", "no_such_package:Square", "posttrain.shapes"),
        EntryPoint("number", "other_package:number", "posttrain.shapes"),
    ]
    monkeypatch.setattr(extensions, "entry_points", lambda group: points if group == "posttrain.shapes" else [])
    return Registry("shape", "posttrain.shapes", {"dict": "collections:OrderedDict"}, dict)


def test_built_in_names_come_first_and_cannot_be_replaced(shapes: Registry[Any]) -> None:
    assert list(shapes) == ["dict", "lost", "number", "square"]
    assert len(shapes) == 4
    assert shapes["dict"].__name__ == "OrderedDict"


def test_nothing_is_imported_before_it_is_used(shapes: Registry[Any]) -> None:
    assert "square" in shapes
    assert "other_package:Square" in shapes
    assert "other_package" not in sys.modules
    assert shapes["square"] is shapes["other_package:Square"]
    assert "other_package" in sys.modules


def test_an_unknown_name_raises_and_suggests_the_nearest(shapes: Registry[Any]) -> None:
    assert "squares" not in shapes
    assert shapes.get("squares") is None
    with pytest.raises(KeyError):
        shapes["squares"]
    with pytest.raises(ValueError, match=r"there is no shape `squares`; did you mean `square`\?"):
        shapes.check("squares")
    assert shapes.check("square") == "square"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lost", "shape lost: cannot import `no_such_package`"),
        ("number", "shape number: `other_package:number` is not a shape; derive it from builtins.dict"),
        ("other_package:Circle", "shape other_package:Circle: module `other_package` has no `Circle`; add it to "),
        ("other_package:Half", "shape other_package:Half: `other_package:Half` does not define area, sides; define it"),
    ],
)
def test_a_wrong_path_raises(shapes: Registry[Any], name: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        shapes[name]
    assert str(error.value).startswith(message)
    with pytest.raises(UserError) as error:
        shapes.load(name, "drawing.shape")
    assert str(error.value).startswith(message.replace(f"shape {name}", "drawing.shape"))
    with pytest.raises(ValueError, match=re.escape(message)):
        shapes.check(name)
