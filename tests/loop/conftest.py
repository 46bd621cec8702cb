"""A loop that reads its config anew at every run."""

from open_loops import loop_class, open_loop, quick

__all__ = ["loop_class", "open_loop", "quick"]
