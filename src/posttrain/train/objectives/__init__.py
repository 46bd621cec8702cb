"""Training objectives, a file each: the formula as a plain function, and the class that feeds it from a model."""
