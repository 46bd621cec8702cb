"""How long does a checkpoint hold a training up, and how long do saving and loading take? Ours against PyTorch's ways.

    python benchmarks/checkpoints.py [--repeats 5] [--folder DIR]

Every way saves the same tensors: what training SmolLM2-135M keeps in float32, masters and AdamW's two moments, 1.6 GB.
Ours copies them, and in the background writes, checksums each tensor, syncs, reads all back, compares, and renames.
The peers: ``torch.save``, alone and with the sync that a checkpoint needs to outlive a power cut; and PyTorch's
distributed checkpoints (DCP) in one process, at once and in a thread (``async_save`` with a stager that keeps its
buffers, and two writing threads). None of them checks what it wrote.

The ways take turns. In each repetition a loop of training-like steps (matrix products on all threads) runs beside:

- *call*: what the call takes, in which nothing is trained;
- *slowdown*: by how much the steps from then on, until a few after the checkpoint is there, took longer in all than the
  median step before the call;
- *stall*: both together;
- *save*: from the call to the finished checkpoint, with and without the steps beside;
- *load*: into fresh memory, with the files out of the page cache.

The table gives medians; a ratio is one of medians, over ``torch.save`` with the sync.
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
    """Masters, two moments and step counts of SmolLM2-135M, float32."""
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
    """Have a file, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Way:
    """A way to save; ``start`` returns when training may go on, ``done`` says when the checkpoint is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = folder / "none"

    def start(self, step: int, state: State) -> None:
        raise NotImplementedError

    def done(self) -> bool:
        return True

    def tidy(self) -> None:
        """Remove the checkpoints before the last one; not timed."""
        for old in self.folder.iterdir():
            if old != self.place:
                shutil.rmtree(old) if old.is_dir() else old.unlink()

    def load(self, state: State) -> State:
        """Into fresh memory; ``state`` gives names and shapes."""
        raise NotImplementedError

    def close(self) -> None: ...


class Ours(Way):
    def __init__(self, folder: Path, background: bool) -> None:
        super().__init__(folder)
        self.checkpoints = Checkpoints(folder, CheckpointConfig(background=background, keep_last=1))

    def start(self, step: int, state: State) -> None:
        self.place = self.folder / f"step-{step:09d}"
        self.checkpoints.save(step, Checkpoint(state, {"step": step}))

    def done(self) -> bool:
        return self.place.exists()

    def tidy(self) -> None:
        assert self.checkpoints.steps() == [int(self.place.name[5:])]  # once what is kept is all that is left

    def load(self, state: State) -> State:
        found = Checkpoints(self.folder).latest()
        assert found is not None
        return found.tensors

    def close(self) -> None:
        self.checkpoints.close()


class TorchSave(Way):
    def __init__(self, folder: Path, synced: bool) -> None:
        super().__init__(folder)
        self.synced = synced

    def start(self, step: int, state: State) -> None:
        self.place = self.folder / f"step-{step}.pt"
        torch.save(state, self.place)
        if self.synced:
            sync(self.place)
            sync(self.folder)

    def load(self, state: State) -> State:
        found: State = torch.load(self.place, weights_only=True)
        return found


class Dcp(Way):
    def __init__(self, folder: Path, background: bool) -> None:
        super().__init__(folder)
        self.stager = DefaultStager(StagingOptions(False, False, False, False)) if background else None
        self.future: Future[Any] | None = None

    def start(self, step: int, state: State) -> None:
        self.place = self.folder / f"step-{step}"
        writer = dcp.FileSystemWriter(self.place, thread_count=2)
        if self.stager is None:
            dcp.save(state, storage_writer=writer, no_dist=True)
        else:
            self.future = dcp.async_save(state, storage_writer=writer, async_stager=self.stager, no_dist=True)

    def done(self) -> bool:
        if self.future is not None and self.future.done():
            self.future.result()
        return self.future is None or self.future.done()

    def load(self, state: State) -> State:
        found = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        dcp.load(found, checkpoint_id=self.place, no_dist=True)
        return found

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


WAYS: dict[str, Callable[[Path], Way]] = {
    "ours": lambda folder: Ours(folder, background=True),
    "ours, in the foreground": lambda folder: Ours(folder, background=False),
    "torch.save": lambda folder: TorchSave(folder, synced=False),
    REFERENCE: lambda folder: TorchSave(folder, synced=True),
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
        """One step's seconds."""
        start = time.perf_counter()
        for _ in range(self.products):
            torch.mm(self.left, self.right, out=self.out)
        return time.perf_counter() - start


def beside(way: Way, step: int, state: State, steps: Steps) -> dict[str, float]:
    """Save while steps go on."""
    usual = statistics.median(steps() for _ in range(10))
    start = time.perf_counter()
    way.start(step, state)
    called = time.perf_counter() - start
    longer, after, saved = 0.0, 0, 0.0
    while after < 4:  # until what the system does late is in it too
        longer += steps() - usual
        if way.done():
            saved = saved or time.perf_counter() - start
            after += 1
    way.tidy()
    return {"call": called, "slowdown": longer, "stall": called + longer, "save beside": saved}


def alone(way: Way, step: int, state: State) -> dict[str, float]:
    """Save, load, and compare what was loaded."""
    start = time.perf_counter()
    way.start(step, state)
    while not way.done():
        time.sleep(0.005)
    saved = time.perf_counter() - start
    way.tidy()
    files = [file for file in way.folder.rglob("*") if file.is_file()]
    for file in files:
        out_of_cache(file)
    start = time.perf_counter()
    found = way.load(state)
    loaded = time.perf_counter() - start
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items()), "what was loaded is something else"
    return {"save": saved, "load": loaded, "bytes": float(sum(file.stat().st_size for file in files))}


def out_of_cache(file: Path) -> None:
    """Have the system drop its copy of the file's content."""
    sync(file)
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure(folder: Path, repeats: int, seconds: float) -> dict[str, dict[str, float]]:
    """Medians by way; the first repetition finds memory and is left out."""
    state, steps = smollm2_state(), Steps(seconds)
    ways = {}
    for number, (name, make) in enumerate(WAYS.items()):
        place = folder / str(number)
        place.mkdir()
        ways[name] = make(place)
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            os.sync()
            values = beside(way, 2 * repeat, state, steps) | alone(way, 2 * repeat + 1, state)
            for key, value in values.items() if repeat else ():
                found[name][key].append(value)
    for way in ways.values():
        way.close()
    return {name: {key: statistics.median(values) for key, values in all_.items()} for name, all_ in found.items()}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to measure; a temporary one there is used, and removed")
    parser.add_argument("--step-seconds", type=float, default=0.25, help="length of a training-like step")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch.distributed")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = measure(Path(folder), arguments.repeats, arguments.step_seconds)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {arguments.repeats} repetitions")
    print("| way | call, ms | slowdown, ms | stall, ms | ratio | save, s | ratio | beside, s | load, s | ratio | GB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    base = found[REFERENCE]
    for name, one in found.items():
        times = [f"{1000 * one[key]:.0f}" for key in ("call", "slowdown", "stall")]
        ratios = {key: f"{one[key] / base[key]:.2f}" for key in ("stall", "save", "load")}
        cells = [name, *times, ratios["stall"], f"{one['save']:.2f}", ratios["save"], f"{one['save beside']:.2f}"]
        print("| " + " | ".join([*cells, f"{one['load']:.2f}", ratios["load"], f"{one['bytes'] / 1e9:.2f}"]) + " |")
    ours, whole = found["ours"], found["ours, in the foreground"]
    print(
        f"our call is {ours['call'] / whole['call']:.1%} of our own save in the foreground, "
        f"{ours['call'] / base['call']:.1%} of {REFERENCE}; with the slowdown {ours['stall'] / whole['stall']:.1%} "
        f"and {ours['stall'] / base['stall']:.1%}"
    )


if __name__ == "__main__":
    main()
