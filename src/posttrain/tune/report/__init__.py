"""The report of a study: charts, tables and sentences."""
