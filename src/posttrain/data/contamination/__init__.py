"""Finds training records that give away evaluation records."""
