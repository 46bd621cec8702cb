"""The fixtures of the loop's tests, for questions about a loop."""

from open_loops import (
    begun_loop,
    copied_loop,
    evaluated_loop,
    evaluated_workspace,
    finished_loop,
    loop_class,
    open_loop,
    quick,
    written_loop,
)

__all__ = [
    "begun_loop",
    "copied_loop",
    "evaluated_loop",
    "evaluated_workspace",
    "finished_loop",
    "loop_class",
    "open_loop",
    "quick",
    "written_loop",
]
