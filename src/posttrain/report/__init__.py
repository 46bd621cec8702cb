"""What stages report and pages show, as plain data: sections of texts, tables and charts."""
