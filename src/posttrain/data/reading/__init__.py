"""Reads files in any accepted format and shape, local or remote, as tables of records."""
