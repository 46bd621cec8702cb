"""Annotators, who answer selected records: people by a CSV file, or a file of answers."""
