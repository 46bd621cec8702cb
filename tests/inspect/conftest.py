"""Questions are asked about the loops that the tests of the loop run."""

from open_loops import loop_class, open_loop, quick

__all__ = ["loop_class", "open_loop", "quick"]
