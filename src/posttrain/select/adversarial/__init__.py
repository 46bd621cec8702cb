"""Prompts a few tokens away from one that a model answers rightly, which it answers otherwise."""
