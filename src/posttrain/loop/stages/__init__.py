"""The stages of a round: what each reads, what it writes, and the package that does its work."""
