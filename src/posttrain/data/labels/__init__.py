"""Estimates label errors from out-of-fold predictions."""
