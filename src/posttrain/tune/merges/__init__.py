"""Measures and searches merges of models on records: importance, validation, and the search of a recipe's numbers."""
