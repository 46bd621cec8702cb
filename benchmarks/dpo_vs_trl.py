"""Measures the tokens a second of DPO, against TRL.

    python benchmarks/dpo_vs_trl.py --model DIR --data hh_harmless_test.jsonl.gz --peer-python OTHER/bin/python
        [--steps 20] [--pairs 4] [--longest 512]

The peer has a virtual environment of its own (``pip install trl==1.16.0`` with the constraints of this project). Ours
and a peer train a step in turn, each in a process of its own, on the same pairs in the same order: SmolLM2-135M, HH's
harmless pairs, 4 an optimiser step, AdamW, bfloat16 (TRL: float32 weights under autocast). TRL runs twice: with the
reference's log-probabilities computed ahead, as ours does, and with the reference model in memory; its padding-free
mode is switched off in 1.16. The benchmark reports tokens without padding a second, where prompts count for both
answers (the median step, the first two left out), the seconds ahead of the first step, the process's peak memory, and
the loss of each step.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from contenders import StepOnRequestSink, compare
from preferences import hh_pairs, pair_units


def ours(model: str, data: str, steps: str, pairs: str) -> None:
    """Train with this program's trainer; print one line of JSON a step."""
    import torch

    from posttrain.models.language_model import load_language_model
    from posttrain.models.task import TaskConfig
    from posttrain.train.config import TrainConfig
    from posttrain.train.objectives.dpo import DpoObjective
    from posttrain.train.trainer import Trainer

    torch.set_num_threads(2)
    rows = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    config = TrainConfig.read(
        {
            "objective": "dpo", "epochs": 1, "batch_size": int(pairs), "micro_batch_tokens": 4096, "shuffle": False,
            "learning_rate": 1e-5, "clip": 1.0, "schedule": {"name": "constant", "warmup": 0.0},
            "optimizer": {"betas": [0.9, 0.999], "weight_decay": 0.0},
            "checkpoint": {"every_seconds": None},
        },
        "benchmark",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        lm, objective = load_language_model(Path(model), TaskConfig()), DpoObjective(pair_units(rows), config)
        sys.stdin.readline()
        Trainer(lm, objective, config, 0, Path(scratch), StepOnRequestSink()).train()


def main() -> None:
    """Compare with both modes of TRL and print a table."""
    if sys.argv[1:2] == ["--ours"]:
        ours(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--longest", type=int, default=512)
    arguments = parser.parse_args()
    rows = hh_pairs(arguments.model, arguments.data, arguments.pairs * arguments.steps, arguments.longest)
    peer = str(Path(__file__).with_name("peers") / "trl_dpo.py")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "pairs.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        settings = [arguments.model, str(data), str(arguments.steps), str(arguments.pairs)]
        command = [sys.executable, __file__, "--ours", *settings]
        references = {"before": "TRL, reference's log-probabilities ahead", "beside": "TRL, reference beside the model"}
        peer_commands = {
            name: [arguments.peer_python, peer, *settings, reference] for reference, name in references.items()
        }
        compare(command, peer_commands)


if __name__ == "__main__":
    main()
