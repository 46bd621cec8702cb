"""A tokenised training set on disk: made once, in parallel, and mapped into memory."""
