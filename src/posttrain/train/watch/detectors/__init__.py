"""The detectors, one file each."""

from posttrain.train.watch.config import WatchConfig
from posttrain.train.watch.detectors.base import Detector
from posttrain.train.watch.detectors.dead_layers import DeadLayers
from posttrain.train.watch.detectors.divergence import Divergence
from posttrain.train.watch.detectors.explosion import Explosion
from posttrain.train.watch.detectors.nan import Nan
from posttrain.train.watch.detectors.no_supervised import NoSupervised
from posttrain.train.watch.detectors.plateau import Plateau
from posttrain.train.watch.values import Measured, StepValues


def before_step(config: WatchConfig) -> tuple[Detector[Measured], ...]:
    """Those that speak before the optimiser steps, in the order in which they are asked."""
    return NoSupervised(), Nan(), Explosion(config.explosion)


def after_step(config: WatchConfig) -> tuple[Detector[StepValues], ...]:
    """Those that judge finished steps."""
    return Divergence(config.divergence), Plateau(config.plateau), DeadLayers(config.dead_layers)


__all__ = ["DeadLayers", "Detector", "Divergence", "Explosion", "Nan", "NoSupervised", "Plateau"]
