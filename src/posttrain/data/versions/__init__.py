"""Dataset versions: builds them from files and a recipe, and reads, compares, exports and removes them."""
