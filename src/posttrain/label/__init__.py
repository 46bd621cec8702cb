"""Ask somebody, or something, for the answers to selected records."""
