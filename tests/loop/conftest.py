"""A loop that reads its config again at every run."""

from open_loops import copied_loop, finished_loop, loop_class, open_loop, quick

__all__ = ["copied_loop", "finished_loop", "loop_class", "open_loop", "quick"]
