"""What a training learns: one lesson a kind of output that its objective needs of the model."""
