"""The processes that train one model together, and everything that they must have in common."""
