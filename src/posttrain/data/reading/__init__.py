"""From files in any accepted format and shape, wherever they lie, to tables of records."""
