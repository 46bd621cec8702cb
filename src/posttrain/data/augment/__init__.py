"""Augmentation: the step, and its methods that vary a record's input while the answer stays right."""
