"""Finds training records that overlap with evaluation records."""
