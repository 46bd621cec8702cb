"""A loop that reads its config anew at every run."""

from open_loops import quick, turned, turned_class

__all__ = ["quick", "turned", "turned_class"]
