"""Measures and searches merges of models on records: conflicts, barriers, importance, validation, numbers."""
