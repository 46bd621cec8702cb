"""The loop's own sets: a pool, a test set and labelled records, small enough to be tables in memory."""
