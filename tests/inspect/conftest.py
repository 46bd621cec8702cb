"""The fixtures of the loop's tests, for questions about a loop."""

from open_loops import loop_class, open_loop, quick

__all__ = ["loop_class", "open_loop", "quick"]
