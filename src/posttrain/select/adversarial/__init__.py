"""Adversarial prompts: a few tokens of a rightly answered prompt are swapped until the answer changes."""
