"""Questions are asked about the loops that the tests of the loop run."""

from open_loops import quick, turned, turned_class

__all__ = ["quick", "turned", "turned_class"]
