"""A linear classifier over n-grams that tells good texts from bad ones, learned from examples of both."""
