"""Regularisation inside the model: dropout and NEFTune."""
