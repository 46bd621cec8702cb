"""Fixtures of models of free text."""

from text_models import specialists

__all__ = ["specialists"]
