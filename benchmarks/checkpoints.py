"""Measures how long a checkpoint stalls training, and how long it takes to save and to load, against PyTorch's methods.

    python benchmarks/checkpoints.py [--repeats 5] [--folder DIR]

All methods save the same tensors, the float32 state of a training of SmolLM2-135M: master weights and AdamW's two
moments, 1.6 GB. Ours copies them, and in the background writes, checksums each tensor, syncs, reads all back, compares,
and renames. The peers are ``torch.save``, alone and with the sync that a checkpoint needs to outlive a power cut; and
PyTorch's distributed checkpoints (DCP) in one process, synchronous and in a thread (``async_save`` with a stager that
keeps its buffers, and two writing threads). None of the peers verifies the files that it wrote.

The methods take turns. In each repetition a loop of training-like steps (matrix products on all threads) runs
alongside, and the benchmark measures:

- *call*: the time of the call itself, during which nothing is trained;
- *slowdown*: the extra time, over the median step before the call, of all steps until a few after the checkpoint is
  complete;
- *stall*: the sum of both;
- *save*: the time from the call to the complete checkpoint, with and without the steps alongside;
- *load*: the time to load into fresh memory, with the files out of the page cache.

The table gives medians; a ratio divides by the median of ``torch.save`` with the sync.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from posttrain.train.checkpoint.checkpoints import Checkpoints
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.checkpoint.format import Checkpoint

State = dict[str, torch.Tensor]
REFERENCE = "torch.save + fsync"


def smollm2_state() -> State:
    """Return master weights, two moments and step counts in the shapes of SmolLM2-135M, float32."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    state: State = {}
    for name, weight in model.named_parameters():
        for kind in ("master", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
            state[f"{kind}.{name}"] = torch.randn(weight.shape, generator=generator)
        state[f"optimizer.step.{name}"] = torch.tensor(1.0)
    return state


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class SaveMethod:
    """The base class of all methods to save and load a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "none"

    def start(self, step: int, state: State) -> None:
        """Start to save; return as soon as training may continue."""
        raise NotImplementedError

    def is_saved(self) -> bool:
        """Return whether the checkpoint is complete."""
        return True

    def prune(self) -> None:
        """Remove the checkpoints before the last one; not timed."""
        for entry in self.folder.iterdir():
            if entry != self.path:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def load(self, state: State) -> State:
        """Load the last checkpoint into fresh memory; ``state`` gives names and shapes."""
        raise NotImplementedError

    def close(self) -> None: ...


class Ours(SaveMethod):
    def __init__(self, folder: Path, background: bool) -> None:
        super().__init__(folder)
        self.checkpoints = Checkpoints(folder, CheckpointConfig(background=background, keep_last=1))

    def start(self, step: int, state: State) -> None:
        self.path = self.folder / f"step-{step:09d}"
        self.checkpoints.save(step, Checkpoint(state, {"step": step}))

    def is_saved(self) -> bool:
        return self.path.exists()

    def prune(self) -> None:
        # `steps` waits for the background thread, which removes the earlier checkpoints itself.
        assert self.checkpoints.steps() == [int(self.path.name[5:])]

    def load(self, state: State) -> State:
        checkpoint = Checkpoints(self.folder).latest()
        assert checkpoint is not None
        return checkpoint.tensors

    def close(self) -> None:
        self.checkpoints.close()


class TorchSave(SaveMethod):
    def __init__(self, folder: Path, fsync: bool) -> None:
        super().__init__(folder)
        self.fsync = fsync

    def start(self, step: int, state: State) -> None:
        self.path = self.folder / f"step-{step}.pt"
        torch.save(state, self.path)
        if self.fsync:
            sync(self.path)
            sync(self.folder)

    def load(self, state: State) -> State:
        tensors: State = torch.load(self.path, weights_only=True)
        return tensors


class Dcp(SaveMethod):
    def __init__(self, folder: Path, background: bool) -> None:
        super().__init__(folder)
        self.stager = DefaultStager(StagingOptions(False, False, False, False)) if background else None
        self.future: Future[Any] | None = None

    def start(self, step: int, state: State) -> None:
        self.path = self.folder / f"step-{step}"
        writer = dcp.FileSystemWriter(self.path, thread_count=2)
        if self.stager is None:
            dcp.save(state, storage_writer=writer, no_dist=True)
        else:
            self.future = dcp.async_save(state, storage_writer=writer, async_stager=self.stager, no_dist=True)

    def is_saved(self) -> bool:
        if self.future is not None and self.future.done():
            self.future.result()
        return self.future is None or self.future.done()

    def load(self, state: State) -> State:
        tensors = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        dcp.load(tensors, checkpoint_id=self.path, no_dist=True)
        return tensors

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


METHODS: dict[str, Callable[[Path], SaveMethod]] = {
    "ours": lambda folder: Ours(folder, background=True),
    "ours, in the foreground": lambda folder: Ours(folder, background=False),
    "torch.save": lambda folder: TorchSave(folder, fsync=False),
    REFERENCE: lambda folder: TorchSave(folder, fsync=True),
    "DCP save": lambda folder: Dcp(folder, background=False),
    "DCP async_save": lambda folder: Dcp(folder, background=True),
}


class Steps:
    """Training-like steps of about the same length: bfloat16 matrix products."""

    def __init__(self, seconds: float) -> None:
        self.left, self.right = (torch.randn(1024, 1024).bfloat16() for _ in range(2))
        self.out = torch.empty(1024, 1024, dtype=torch.bfloat16)
        self.products = 20
        self.products = max(1, round(20 * seconds / statistics.median(self() for _ in range(5))))

    def __call__(self) -> float:
        """Run one step and return its seconds."""
        start = time.perf_counter()
        for _ in range(self.products):
            torch.mm(self.left, self.right, out=self.out)
        return time.perf_counter() - start


def measure_during_steps(method: SaveMethod, step: int, state: State, steps: Steps) -> dict[str, float]:
    """Save while steps continue."""
    median_step = statistics.median(steps() for _ in range(10))
    start = time.perf_counter()
    method.start(step, state)
    call = time.perf_counter() - start
    slowdown, steps_after, save = 0.0, 0, 0.0
    while steps_after < 4:  # the system continues writing for a while after the save, which slows these steps too
        slowdown += steps() - median_step
        if method.is_saved():
            save = save or time.perf_counter() - start
            steps_after += 1
    method.prune()
    return {"call": call, "slowdown": slowdown, "stall": call + slowdown, "save beside": save}


def measure_alone(method: SaveMethod, step: int, state: State) -> dict[str, float]:
    """Save and load with nothing running alongside, and check the loaded tensors."""
    start = time.perf_counter()
    method.start(step, state)
    while not method.is_saved():
        time.sleep(0.005)
    save = time.perf_counter() - start
    method.prune()
    files = [file for file in method.folder.rglob("*") if file.is_file()]
    for file in files:
        evict_from_cache(file)
    start = time.perf_counter()
    tensors = method.load(state)
    load = time.perf_counter() - start
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state.items()), "the loaded tensors differ"
    return {"save": save, "load": load, "bytes": float(sum(file.stat().st_size for file in files))}


def evict_from_cache(file: Path) -> None:
    """Drop the file's content from the page cache."""
    sync(file)
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure(folder: Path, repeats: int, seconds: float) -> dict[str, dict[str, float]]:
    """Return the median of each measure by method; the first repetition allocates memory and is left out."""
    state, steps = smollm2_state(), Steps(seconds)
    methods = {}
    for number, (name, make) in enumerate(METHODS.items()):
        subfolder = folder / str(number)
        subfolder.mkdir()
        methods[name] = make(subfolder)
    runs: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in methods}
    for repeat in range(repeats + 1):
        for name, method in methods.items():
            os.sync()
            measures = measure_during_steps(method, 2 * repeat, state, steps) | measure_alone(
                method, 2 * repeat + 1, state
            )
            for key, value in measures.items() if repeat else ():
                runs[name][key].append(value)
    for method in methods.values():
        method.close()
    return {name: {key: statistics.median(values) for key, values in by_key.items()} for name, by_key in runs.items()}


def main() -> None:
    """Measure all methods and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", help="a folder on the disk to measure; a temporary folder in it is used and removed"
    )
    parser.add_argument("--step-seconds", type=float, default=0.25, help="length of a training-like step")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch.distributed")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        medians = measure(Path(folder), arguments.repeats, arguments.step_seconds)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {arguments.repeats} repetitions")
    print("| way | call, ms | slowdown, ms | stall, ms | ratio | save, s | ratio | beside, s | load, s | ratio | GB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    reference = medians[REFERENCE]
    for name, row in medians.items():
        times = [f"{1000 * row[key]:.0f}" for key in ("call", "slowdown", "stall")]
        ratios = {key: f"{row[key] / reference[key]:.2f}" for key in ("stall", "save", "load")}
        cells = [name, *times, ratios["stall"], f"{row['save']:.2f}", ratios["save"], f"{row['save beside']:.2f}"]
        print("| " + " | ".join([*cells, f"{row['load']:.2f}", ratios["load"], f"{row['bytes'] / 1e9:.2f}"]) + " |")
    ours, foreground = medians["ours"], medians["ours, in the foreground"]
    print(
        f"our call takes {ours['call'] / foreground['call']:.1%} of our own save in the foreground and "
        f"{ours['call'] / reference['call']:.1%} of {REFERENCE}; the stall, with the slowdown, takes "
        f"{ours['stall'] / foreground['stall']:.1%} and {ours['stall'] / reference['stall']:.1%}"
    )


if __name__ == "__main__":
    main()
