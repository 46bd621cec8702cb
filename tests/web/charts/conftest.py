"""The shapes and texts of a chart."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest

_SVG = "{http://www.w3.org/2000/svg}"


def _shapes(svg: str, tag: str, class_: str) -> list[ElementTree.Element]:
    return [shape for shape in ElementTree.fromstring(svg).iter(_SVG + tag) if shape.get("class") == class_]


def _texts(svg: str) -> list[str]:
    return ["".join(shape.itertext()) for shape in ElementTree.fromstring(svg).iter(_SVG + "text")]


@pytest.fixture(scope="session")
def shapes() -> Callable[[str, str, str], list[ElementTree.Element]]:
    """``shapes(svg, tag, class_)``: the elements of a chart that have just this class."""
    return _shapes


@pytest.fixture(scope="session")
def texts() -> Callable[[str], list[str]]:
    """``texts(svg)``: each text of a chart."""
    return _texts
