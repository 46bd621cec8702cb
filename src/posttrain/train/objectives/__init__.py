"""Training objectives: pure functions from what a model computed to a sum, a count and metrics."""
