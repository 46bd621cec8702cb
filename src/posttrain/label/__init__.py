"""Obtains answers to selected records: from people, or from a file of known answers."""
