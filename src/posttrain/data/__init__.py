"""Read, check, clean, split and version records."""
