"""The columns of a score table: what each means, how a model computes it, and where it is kept meanwhile."""
