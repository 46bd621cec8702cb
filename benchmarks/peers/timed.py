"""What TRL's trainers share here: a step for each line that is read, and a line of JSON after it."""

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback


class Timed(TrainerCallback):
    """Times each step, and holds the next one up until it is asked for.

    Args:
        tokens: of the step just done, without padding, from what the trainer logged.
    """

    def __init__(self, tokens: Callable[[Mapping[str, float]], float]) -> None:
        self.tokens = tokens

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        sys.stdin.readline()
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter() - self.start

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **__: Any) -> None:
        if "loss" in logs:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            found = {"loss": logs["loss"], "tokens": self.tokens(logs), "seconds": self.seconds, "bytes": peak}
            print(json.dumps(found), flush=True)
