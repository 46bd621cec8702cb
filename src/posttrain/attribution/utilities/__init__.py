"""Utilities: the evaluation score of a model trained on a set of records."""
