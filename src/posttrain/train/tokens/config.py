"""The config section ``train.loader``."""

from pydantic import Field

from posttrain.store.section import Section


class LoaderConfig(Section):
    """How examples come to the model."""

    processes: int | None = Field(
        None, ge=1, description="Processes that tokenise a large training set; none: one a core."
    )
    workers: int = Field(1, ge=0, description="Threads that pack batches ahead; 0: the training packs its own.")
    prefetch: int = Field(2, ge=1, description="Optimiser steps that are packed ahead.")
