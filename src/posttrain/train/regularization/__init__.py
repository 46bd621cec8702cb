"""Regularisation inside the model: dropout, NEFTune, adversarial training, weight standardisation."""
