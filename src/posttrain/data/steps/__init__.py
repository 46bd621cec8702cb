"""The steps of the data pipeline, one a file; `posttrain.data.steps.registry` lists them."""
