"""Builds the loop's own sets, the pool, the test set and labelled records, as tables in memory."""
