"""Profiles a dataset version, and measures drift between two; `posttrain.data.report.page` draws both."""
