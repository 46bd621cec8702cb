"""Ensembles: several models answer together, where their weights cannot be merged."""

from posttrain.store.extensions import lazy_exports

__getattr__ = lazy_exports(
    __name__, {"Ensemble": "ensemble", "EnsembleConfig": "config", "Member": "members", "HeadModel": "members"}
)
