"""Training checkpoints: written whole or not at all, in the background, verified and pruned."""
