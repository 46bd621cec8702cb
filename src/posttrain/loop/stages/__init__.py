"""The stages of a round, each in the file of its name."""
