"""A linear classifier over n-grams that separates good texts from bad ones, trained on examples of both."""
