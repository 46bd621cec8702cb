"""What a set of training records is worth: the score of a model that has learnt from them."""
