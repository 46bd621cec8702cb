"""Finds exact, near and semantic duplicates, by the hashed n-grams or the embeddings of texts."""
