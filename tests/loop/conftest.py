"""A loop that reads its config again at every run."""

from open_loops import loop_class, open_loop, quick

__all__ = ["loop_class", "open_loop", "quick"]
