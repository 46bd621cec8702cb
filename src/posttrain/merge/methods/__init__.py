"""Merge methods, one idea a file."""
