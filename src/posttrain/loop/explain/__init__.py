"""Why the model answers a record as it does, and why a record was chosen."""
