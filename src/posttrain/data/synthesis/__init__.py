"""New records out of seed records, by a model that is asked for them."""
