"""Ways to multiply the inverse of a curvature with vectors."""
