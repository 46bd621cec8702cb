"""Where the values of each step go."""

from posttrain.train.watch.sinks.base import Sink
from posttrain.train.watch.sinks.config import SinksConfig
from posttrain.train.watch.sinks.together import open_sinks

__all__ = ["Sink", "SinksConfig", "open_sinks"]
