"""Training from scratch: initial weights, and their effect on activations and gradients."""
