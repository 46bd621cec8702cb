"""Terms that texts are searched for."""
