"""The steps of the data pipeline; `posttrain.data.steps.registry` lists them by name."""
