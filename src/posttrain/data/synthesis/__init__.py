"""Writes new records from seed records with a model."""
