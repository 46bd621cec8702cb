"""How much memory a training takes, by formula, and what fits."""
