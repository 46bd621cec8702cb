"""The work and the tokens that the meter reports for a step."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Unit, pack
from posttrain.train.data.loader import BatchLengths
from posttrain.train.monitor import meter

PROMPT = list(range(5, 25))
PAIR: Unit = [
    TokenizedExample([*PROMPT, *answer], [False] * 20 + [True] * 4) for answer in ([30, 31, 32, 9], [40, 41, 42, 9])
]
SEPARATE_UNITS: list[Unit] = [[sequence] for sequence in PAIR]


def test_a_shared_prompt_counts_once(fresh: Callable[..., LanguageModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of tokens still counts both sequences."""
    packed = pack([PAIR])
    lengths = BatchLengths.from_packed([PAIR], [packed])
    # 19 tokens of the prompt are shared; its last one predicts, and the last of an answer is not read.
    assert lengths == BatchLengths([24, 24], 19 + 2 * 4, 19 * 20 // 2 + 2 * (20 + 21 + 22 + 23))
    separate_rows = [pack([unit]) for unit in SEPARATE_UNITS]
    assert BatchLengths.from_packed(SEPARATE_UNITS, separate_rows) == BatchLengths([24, 24], 2 * 23, 2 * (23 * 24 // 2))
    monkeypatch.setattr(meter, "matmul_rate", lambda *_: 1e12)
    monkeypatch.setattr(meter, "mfu", lambda flops, seconds, peak: flops / 1e12)
    step_meter = meter.StepMeter(fresh(), "bfloat16", classifier=False, weights_frozen=False)

    def read_meter(lengths: BatchLengths) -> dict[str, Any]:
        return step_meter.read(lengths, 8, 0.0, 0.0)

    shared, separate = read_meter(lengths), read_meter(BatchLengths.from_packed(SEPARATE_UNITS, separate_rows))
    assert shared["tokens"] == separate["tokens"] == 48
    assert shared["mfu"] < 0.75 * separate["mfu"]


def test_a_step_faster_than_the_peak_raises_it(
    fresh: Callable[..., LanguageModel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other work had slowed the measurement: a share above 1 says so once, and later shares are of the new peak."""
    caplog.set_level("INFO")
    raised: list[tuple[float, torch.dtype]] = []
    monkeypatch.setattr(meter, "matmul_rate", lambda *_: 100.0)
    monkeypatch.setattr(meter, "raise_matmul_rate", lambda flops, dtype, device: raised.append((flops, dtype)))
    # A second and a FLOP count for each step, by a clock and a count of the test's own.
    clock = iter(range(100))
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    flops = iter([50.0, 149.0, 149.0, 74.5, 298.0])
    monkeypatch.setattr(meter, "training_flops", lambda *_, **__: next(flops))
    step_meter = meter.StepMeter(fresh(), "bfloat16", classifier=False, weights_frozen=False)
    shares = []
    for _ in range(5):
        step_meter.start()
        shares.append(step_meter.read(BatchLengths([1], 1, 1), 1, 0.0, 0.0)["mfu"])
    assert shares == [0.5, 1.0, 1.0, 0.5, 1.0]
    assert raised == [(149.0, torch.bfloat16), (298.0, torch.bfloat16)]
    assert caplog.messages == ["  the peak is 1.49e-10 TFLOP/s, not 1e-10 as measured: a step was faster"]
