"""The user's own Python function scores the written answer."""

from __future__ import annotations

import importlib
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.examples import Examples
from posttrain.evaluate.scorers.base import Scored, Scorer, from_answers
from posttrain.store.errors import UserError, WorkError

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel


def score(lm: LanguageModel, examples: Examples, suite: SuiteConfig, where: str) -> Scored:
    """Call ``function(answer, expected, prompt)`` for every record; an answer that was cut off is invalid.

    ``answer`` is the text that the model wrote, ``expected`` the record's answer or None, ``prompt`` the
    turns. It returns a number or a bool; higher is better.

    Raises:
        UserError: if the function cannot be imported (before the model answers anything).
        WorkError: if it fails on a record or returns no finite number, naming the record.
    """
    from posttrain.models.generate import generate

    function = load_function(suite.function or "", where)
    answers = generate(lm, examples.prompts)
    values = []
    for answer, want, prompt, place in zip(answers, examples.expected, examples.prompts, examples.places, strict=True):
        try:
            value = float(function(answer.text, want, prompt))
        except Exception as error:  # the user's code may raise anything
            raise WorkError(f"{suite.function} failed on {place}: {type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise WorkError(f"{suite.function} returned {value} for {place}; a finite number is needed")
        values.append(value)
    return from_answers(answers, values, [answer.finished for answer in answers])


def load_function(path: str, where: str, root: Path | None = None) -> Callable[..., Any]:
    """Import ``package.module:function``.

    Args:
        path: the function.
        where: what the error names.
        root: a folder where modules are looked for too, after all others, from now on.

    Raises:
        UserError: if there is no such module or no such function in it, or the module fails, with its line.
    """
    if root is not None and (folder := str(root.resolve())) not in sys.path:
        sys.path.append(folder)
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise UserError(f"`{path}` is no dotted path", where=where, fix="write package.module:function")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may do anything
        place = _place(error)
        fix = "mend it" if place else "put it in the workspace's folder or on PYTHONPATH"
        said = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
        raise UserError(f"cannot import `{module_name}`: {said}{place}", where=where, fix=fix) from error
    function = getattr(module, name, None)
    if not callable(function):
        file = getattr(module, "__file__", None)
        what = f"module `{module_name}` has no function `{name}`"
        raise UserError(what, where=where, fix=f"add it to {file}" if file else None)
    return function  # type: ignore[no-any-return]


def _place(error: BaseException) -> str:
    """Where a module failed, as `` (file:line)``: the broken line, or the user's line that led to the error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.name == "<module>":  # what stands before it is the machinery of imports
            return f" ({frame.filename}:{frame.lineno})"
    return ""


PYTHON = Scorer(score, main="score", paired="score", metrics=frozenset({"score", "invalid_rate"}))
