"""Runs a TRL trainer in step with another program: a step for each input line, and a line of JSON after it."""

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback


class StepOnRequest(TrainerCallback):
    """Times each step, and blocks the next one until a line on the standard input requests it.

    Args:
        tokens: returns the tokens of the last step, without padding, from the trainer's logs.
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
            row = {"loss": logs["loss"], "tokens": self.tokens(logs), "seconds": self.seconds, "bytes": peak}
            print(json.dumps(row), flush=True)
