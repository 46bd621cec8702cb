"""Labels that are wrong, found from predictions made out of fold."""
