"""Training from scratch: the weights that a model begins with, and a look at what they do to its signals."""
