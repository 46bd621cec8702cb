"""Texts that say the same, or nearly the same, and the sets of hashed n-grams by which they are compared."""
