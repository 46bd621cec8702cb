"""Compares the loss and gradients of each objective with TRL's, on one batch of real data, in float32.

    python benchmarks/equal_to_trl.py --model DIR --gsm8k gsm8k_train.jsonl --hh hh_harmless_test.jsonl.gz \\
        --peer-python OTHER/bin/python [--pairs 6] [--longest 384] [--objectives sft dpo ...]

The peer has a virtual environment of its own (``pip install trl==1.16.0`` with the constraints of this project). Both
programs get the same token ids. The reference of DPO, IPO and KTO is the model with noise on its weights, so that no
log-ratio is 0; KTO's answers alternate between desirable and undesirable. Ours splits the batch into micro-batches of
700 tokens, TRL does not. The benchmark reports both losses, their difference, and the largest difference of any
gradient as a share of the largest gradient.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from preferences import hh_pairs, pair_units

Row = dict[str, Any]

TOKENS = 700
NOISE = 0.002
SETTINGS: dict[str, Row] = {
    "sft": {}, "dpo": {}, "ipo": {}, "kto": {}, "orpo": {}, "reward": {}, "simpo": {"beta": 2.0, "gamma": 0.5},
}  # fmt: skip


def batches(model: str, gsm8k: str, hh: str, pairs: int, max_length: int) -> dict[str, list[Row]]:
    """Return the rows of each objective's batch, in the form that TRL's collators take."""
    from posttrain.models.language_model import load_language_model
    from posttrain.models.task import TaskConfig

    lm, examples = load_language_model(Path(model), TaskConfig()), []
    with open(gsm8k, encoding="utf-8") as file:
        for _ in range(pairs):
            row = json.loads(next(file))
            example = lm.encode([{"role": "user", "content": row["question"]}], row["answer"])
            labels = [token if flag else -100 for token, flag in zip(example.ids, example.supervised, strict=True)]
            examples.append({"input_ids": example.ids, "labels": labels})
    rows = hh_pairs(model, hh, pairs, max_length)
    answers = [
        {"prompt_ids": row["prompt_ids"], "completion_ids": row[side], "label": side == "chosen_ids"}
        for row, side in zip(rows, ["chosen_ids", "rejected_ids"] * len(rows), strict=False)
    ]
    return {name: examples if name == "sft" else answers if name == "kto" else rows for name in SETTINGS}


def write_models(model: str, folder: Path) -> None:
    """Write the reference model, and the model with a reward head, both in float32."""
    import torch

    from posttrain.models.classifier import REWARD, load_classifier
    from posttrain.models.language_model import load_language_model, save_language_model
    from posttrain.models.task import TaskConfig

    torch.manual_seed(0)
    save_language_model(load_classifier(Path(model), TaskConfig(), "float32", REWARD), folder / "reward", "float32")
    lm = load_language_model(Path(model), TaskConfig(), "float32")
    with torch.no_grad():
        for weight in lm.model.parameters():
            weight += NOISE * torch.randn_like(weight)
    save_language_model(lm, folder / "reference", "float32")


def ours(objective_name: str, model: str, reference: str, batch: str, out: str) -> None:
    """Write this program's loss and gradients into the folder ``out``."""
    from safetensors.torch import save_file

    from posttrain.models.chat import TokenizedExample
    from posttrain.models.language_model import load_language_model
    from posttrain.models.packing import micro_batches, pack, packed_attention
    from posttrain.models.task import TaskConfig
    from posttrain.train.config import TrainConfig
    from posttrain.train.objectives.base import ObjectiveInputs
    from posttrain.train.objectives.build import build_objective, load_model

    rows = json.loads(Path(batch).read_text(encoding="utf-8"))
    units: list[Any] = []
    if objective_name == "sft":
        units = [[TokenizedExample(row["input_ids"], [label != -100 for label in row["labels"]])] for row in rows]
    elif objective_name == "kto":
        for row in rows:
            prompt, answer = row["prompt_ids"], row["completion_ids"]
            units.append([TokenizedExample(prompt + answer, [False] * len(prompt) + [True] * len(answer))])
    else:
        units = pair_units(rows)
    config = TrainConfig.read(
        {
            "objective": {"name": objective_name, **SETTINGS[objective_name]},
            "precision": "float32",
            "batch_size": len(rows),
        },
        "benchmark",
    )
    lm = load_model(config, Path(model), TaskConfig(), "float32")
    targets = [int(row["label"]) for row in rows] if objective_name == "kto" else []
    objective = build_objective(ObjectiveInputs(units, config, lm, targets, [0.0] * len(rows)))
    max_length = max(len(sequence.ids) for unit in objective.units for sequence in unit)
    if objective_name in ("dpo", "ipo", "kto"):
        reference_model = load_language_model(Path(reference), TaskConfig(), "float32")
        with packed_attention(reference_model, max_length):
            objective.prepare(reference_model, Path(out), padded=False)
        del reference_model
    with packed_attention(lm, max_length) as is_packed:
        groups, unit_rows = list(micro_batches(list(objective.units), TOKENS)), iter(range(len(objective.units)))
        row_groups = [[next(unit_rows) for _ in group] for group in groups]
        divisor, loss_sum = objective.begin_step(lm, row_groups), 0.0
        for group, group_rows in zip(groups, row_groups, strict=True):
            loss = objective.loss(lm, pack(group, padded=not is_packed), group_rows)
            (loss.sum / divisor).backward()
            loss_sum += loss.sum.item()
    (Path(out) / "loss.json").write_text(json.dumps(loss_sum / divisor), encoding="utf-8")
    weights = lm.model.named_parameters()
    save_file(
        {name: weight.grad for name, weight in weights if weight.grad is not None}, Path(out) / "gradients.safetensors"
    )


def read_differences(ours: Path, peer: Path) -> tuple[float, float, float]:
    """Return both losses, and the largest difference of a gradient as a share of the largest gradient."""
    from safetensors.torch import load_file

    losses = [json.loads((folder / "loss.json").read_bytes()) for folder in (ours, peer)]
    gradients, peer_gradients = (load_file(folder / "gradients.safetensors") for folder in (ours, peer))
    if gradients.keys() != peer_gradients.keys():
        raise SystemExit(f"only one program has gradients of: {sorted(gradients.keys() ^ peer_gradients.keys())}")
    largest = max(float(gradient.abs().max()) for gradient in peer_gradients.values())
    difference = max(float((gradients[name] - gradient).abs().max()) for name, gradient in peer_gradients.items())
    return losses[0], losses[1], difference / largest


def main() -> None:
    """Compare all objectives and print a table."""
    if sys.argv[1:2] == ["--ours"]:
        ours(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--gsm8k", required=True)
    parser.add_argument("--hh", required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--longest", type=int, default=384, help="maximum tokens of a pair's longer sequence")
    parser.add_argument("--objectives", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    arguments = parser.parse_args()
    peer = Path(__file__).with_name("peers") / "trl_losses.py"
    print("| objective | loss, ours | loss, TRL | difference | largest difference of a gradient |")
    print("| --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_models(arguments.model, folder)
        rows_by_objective = batches(arguments.model, arguments.gsm8k, arguments.hh, arguments.pairs, arguments.longest)
        for name, rows in rows_by_objective.items():
            if name not in arguments.objectives:
                continue
            batch, outs = folder / "batch.json", [folder / f"{program}-{name}" for program in ("ours", "trl")]
            batch.write_text(json.dumps(rows), encoding="utf-8")
            model = str(folder / "reward") if name == "reward" else arguments.model
            commands = [sys.executable, __file__, "--ours"], [arguments.peer_python, str(peer)]
            for command, out in zip(commands, outs, strict=True):
                out.mkdir()
                call = [*command, name, model, str(folder / "reference"), str(batch), str(out)]
                process = subprocess.run(call, capture_output=True, text=True)
                if process.returncode:
                    raise SystemExit(f"{name}: {process.stderr}")
            loss, peer_loss, difference = read_differences(*outs)
            cells = f"{loss:.6f} | {peer_loss:.6f} | {abs(loss - peer_loss):.1e} | {difference:.1e}"
            print(f"| {name} | {cells} |", flush=True)
            for out in outs:
                (out / "gradients.safetensors").unlink()


if __name__ == "__main__":
    main()
