"""The columns of a score table: their definitions, how models compute them, and their cache."""
