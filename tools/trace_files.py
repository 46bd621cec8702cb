"""Counts the files whose code runs along a path: ``python tools/trace_files.py [PATH ...]``.

Paths: ``step`` (one step of supervised training), ``version`` (a file to a dataset version), ``batch`` (one batch
selected from a score table), ``stage`` (a stage that writes one file). Each runs on a tiny example; `sys.setprofile`
records the calls between the entry of the function named in `WINDOWS` and its return.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("POSTTRAIN_SRC", Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"

# By path: the end of the file's name and the function, today's first; how many calls come before the traced one.
WINDOWS = {
    "step": ([("train/trainer.py", "train_step"), ("train/trainer.py", "_step")], 1),
    "version": ([("versions/named_build.py", "build_named"), ("versions/named_build.py", "build")], 0),
    "batch": ([("select/batch.py", "choose_batch"), ("select/batch.py", "choose")], 0),
    "stage": ([("store/stage_runner.py", "run_stage"), ("store/stages.py", "run_stage")], 0),
}


class Tracer:
    """Records the package's files and functions that run while a window is open."""

    def __init__(self, path: str) -> None:
        self.windows, self.skip = WINDOWS[path]
        self.files: dict[str, set[str]] = {}
        self.window: Any = None
        self.calls = 0

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        """The profile function of `sys.setprofile`."""
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(str(ROOT)):
            return
        entered = any(file.endswith(end) and name == function for end, function in self.windows)
        if self.window is None and event == "call" and entered:
            self.calls += 1
            if self.calls == self.skip + 1:
                self.window = frame
        if self.window is not None and event == "call":
            self.files.setdefault(str(Path(file).relative_to(ROOT / "posttrain")), set()).add(name)
        if frame is self.window and event == "return":
            self.window = False
            sys.setprofile(None)


def write_records(path: Path, count: int = 24) -> Path:
    """A small file of records with three classes."""
    rows = [
        {
            "prompt": f"question {number * 7919} about topic {number % 3} and item {number}",
            "completion": f"c{number % 3}",
        }
        for number in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def run_step(folder: Path) -> None:
    """Train the tiny model for a few steps."""
    from posttrain.train import train

    settings = {"train": {"epochs": 2, "batch_size": 8}}
    train("tiny", write_records(folder / "a.jsonl"), folder / "out", settings=settings)


def run_version(folder: Path) -> None:
    """Build a version of a file with the default steps."""
    from posttrain.cli.main import main

    write_records(folder / "a.jsonl")
    call(main, ["data", "add", str(folder / "a.jsonl"), "--name", "a", "--engine", "inline", "-w", str(folder)])


def run_batch(folder: Path) -> None:
    """Turn a tiny loop until its first batch is selected."""
    from posttrain.cli.main import main

    write_records(folder / "pool.jsonl", 60)
    config = "model: tiny\nrounds: 1\ntask: {labels: [c0, c1, c2]}\ndata: {pool: pool.jsonl, test: test.jsonl}\n"
    rows = [
        {"prompt": f"test {number * 104729} of topic {number % 3}", "completion": f"c{number % 3}"}
        for number in range(24)
    ]
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "posttrain.yaml").write_text(
        config + "label: {annotator: oracle, file: pool.jsonl, per_round: 8}\nevaluate: {latency: {prompts: 0}}\n",
        encoding="utf-8",
    )
    call(main, ["run", "-w", str(folder), "--until", "select"])


def run_stage(folder: Path) -> None:
    """Run a stage that writes one file."""
    try:
        from posttrain.store.stage_runner import run_stage as run
    except ModuleNotFoundError:  # the tree before stages had a runner
        from posttrain.store.stages import run_stage as run
    from posttrain.store.workspace import Workspace

    def work(out: Path, scratch: Path) -> dict[str, Any]:
        (out / "value.txt").write_text("1", encoding="utf-8")
        return {}

    (folder / "posttrain.yaml").write_text("model: tiny\n", encoding="utf-8")
    with Workspace.create(folder) as workspace, workspace.lock():
        run(workspace, "toy", 1, kind="toy", inputs={}, config={}, seed=0, round=None, work=work)


def call(main: Callable[[], None], arguments: list[str]) -> None:
    """Call the command line in this process."""
    sys.argv = ["posttrain", *arguments]
    try:
        main()
    except SystemExit as error:
        if error.code:
            raise


def main() -> None:
    """Trace the paths that the command line names, all by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"of {', '.join(WINDOWS)}; all by default")
    parser.add_argument("--files", action="store_true", help="list the files, too")
    options = parser.parse_args()
    runs = {"step": run_step, "version": run_version, "batch": run_batch, "stage": run_stage}
    for path in options.paths or WINDOWS:
        tracer = Tracer(path)
        with tempfile.TemporaryDirectory() as folder:
            sys.setprofile(tracer)
            try:
                runs[path](Path(folder))
            finally:
                sys.setprofile(None)
        functions = sum(map(len, tracer.files.values()))
        print(f"{path}: {len(tracer.files)} files, {functions} functions", flush=True)
        if options.files:
            for file, names in sorted(tracer.files.items()):
                print(f"  {file}: {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
