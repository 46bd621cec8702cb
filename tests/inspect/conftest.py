"""The fixtures of the loop's tests, for questions about a loop."""

from open_loops import copied_loop, finished_loop, loop_class, open_loop, quick

__all__ = ["copied_loop", "finished_loop", "loop_class", "open_loop", "quick"]
