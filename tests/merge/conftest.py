"""Fixtures of the tests of merging."""

from model_family import family

__all__ = ["family"]
