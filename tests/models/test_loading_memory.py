"""Loading, saving and merging hold the weights once: peaks of resident memory in fresh processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.models.tiny import write_tiny_model

pytestmark = pytest.mark.slow

_PROGRAM = """
import gc, math, sys, tempfile
from pathlib import Path
from posttrain.models.language_model import load_language_model, save_language_model
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.models.weight_files import read_headers
from posttrain.train.lora_config import LoraConfig
from posttrain.train.lora import add_adapter, merge_adapter

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def run(model, out, dtype, report):
    gc.collect()
    base = memory("VmRSS")
    size = sum(math.prod(header.shape) for header in read_headers(model).values()) * (2 if dtype == "bfloat16" else 4)
    def act(function):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
        value = function()
        report.append((memory("VmHWM") - base) / size)
        return value
    lm = act(lambda: load_language_model(model, TaskConfig(), dtype))
    act(lambda: save_language_model(lm, out, dtype))
    lm = add_adapter(lm, LoraConfig(rank=1))
    lm = act(lambda: merge_adapter(lm, out / "adapter"))
    act(lambda: save_language_model(lm, out / "merged"))

with tempfile.TemporaryDirectory() as folder:
    # For what the libraries allocate on a first call.
    run(write_tiny_model(Path(folder) / "tiny"), Path(folder) / "out", sys.argv[2], [])
    peaks = []
    run(Path(sys.argv[1]), Path(folder) / "measured", sys.argv[2], peaks)
    print(*peaks)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """26 million weights in files of 52 MB."""
    return write_tiny_model(tmp_path_factory.mktemp("model"), width=512, layers=10)


# In multiples of the weights' bytes, as in `benchmarks/loading_memory.py`. Weights in the file's dtype are mapped from
# it; others are converted one by one, while the file, half as large, is mapped too. A merged adapter leaves the layer's
# own copies in float32, and what the C library does not return of them.
@pytest.mark.parametrize(
    ("dtype", "limits"),
    [
        ("bfloat16", (1.4, 1.4, 2.4, 2.4)),
        pytest.param("float32", (1.8, 1.4, 1.7, 1.7), marks=pytest.mark.long),
    ],
)
def test_the_weights_are_in_memory_once(model: Path, dtype: str, limits: tuple[float, ...]) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(model), dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peaks = [float(peak) for peak in done.stdout.splitlines()[-1].split()]
    assert len(peaks) == len(limits)
    assert all(0.9 < peak < limit for peak, limit in zip(peaks, limits, strict=True)), peaks
