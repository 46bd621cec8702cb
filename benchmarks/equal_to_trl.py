"""Are losses and gradients TRL's? One batch of real data for each objective, in float32.

    python benchmarks/equal_to_trl.py --model DIR --gsm8k gsm8k_train.jsonl --hh hh_harmless_test.jsonl.gz \\
        --peer-python OTHER/bin/python [--pairs 6] [--longest 384] [--objectives sft dpo ...]

The peer has a virtual environment of its own (``pip install trl==1.16.0`` with the constraints of this project). Both
sides get the same token ids. The reference of DPO, IPO and KTO is the model with noise on its weights, so that no
log-ratio is 0; KTO's answers alternate between desirable and not. Ours is cut into micro-batches of 700 tokens, TRL's
is one batch. Reported are both losses, their difference, and the largest difference of any gradient as a share of the
largest gradient.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from preferences import hh_pairs, units

Row = dict[str, Any]

TOKENS = 700
NOISE = 0.002
SETTINGS: dict[str, Row] = {
    "sft": {}, "dpo": {}, "ipo": {}, "kto": {}, "orpo": {}, "reward": {}, "simpo": {"beta": 2.0, "gamma": 0.5},
}  # fmt: skip


def batches(model: str, gsm8k: str, hh: str, pairs: int, longest: int) -> dict[str, list[Row]]:
    """What each objective reads, as TRL's collators take it."""
    from posttrain.models.language_model import load_language_model
    from posttrain.models.task import TaskConfig

    lm, taught = load_language_model(Path(model), TaskConfig()), []
    with open(gsm8k, encoding="utf-8") as file:
        for _ in range(pairs):
            row = json.loads(next(file))
            found = lm.encode([{"role": "user", "content": row["question"]}], row["answer"])
            labels = [token if on else -100 for token, on in zip(found.ids, found.supervised, strict=True)]
            taught.append({"input_ids": found.ids, "labels": labels})
    rows = hh_pairs(model, hh, pairs, longest)
    answers = [
        {"prompt_ids": row["prompt_ids"], "completion_ids": row[side], "label": side == "chosen_ids"}
        for row, side in zip(rows, ["chosen_ids", "rejected_ids"] * len(rows), strict=False)
    ]
    return {name: taught if name == "sft" else answers if name == "kto" else rows for name in SETTINGS}


def write_models(model: str, folder: Path) -> None:
    """The reference, and the model under a reward head, both in float32."""
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


def ours(objective: str, model: str, reference: str, batch: str, out: str) -> None:
    """Write this program's loss and gradients into a folder."""
    from safetensors.torch import save_file

    from posttrain.models.chat import TokenizedExample
    from posttrain.models.language_model import load_language_model
    from posttrain.models.packing import micro_batches, pack, packed_attention
    from posttrain.models.task import TaskConfig
    from posttrain.train.config import TrainConfig
    from posttrain.train.objectives.base import ObjectiveInputs
    from posttrain.train.objectives.build import build_objective, load_model

    rows = json.loads(Path(batch).read_text(encoding="utf-8"))
    given: list[Any] = []
    if objective == "sft":
        given = [[TokenizedExample(row["input_ids"], [label != -100 for label in row["labels"]])] for row in rows]
    elif objective == "kto":
        for row in rows:
            asked, said = row["prompt_ids"], row["completion_ids"]
            given.append([TokenizedExample(asked + said, [False] * len(asked) + [True] * len(said))])
    else:
        given = units(rows)
    config = TrainConfig.read(
        {"objective": objective, "precision": "float32", "batch_size": len(rows)}
        | ({objective: SETTINGS[objective]} if objective != "sft" else {}),
        "benchmark",
    )
    lm = load_model(config, Path(model), TaskConfig(), "float32")
    targets = [int(row["label"]) for row in rows] if objective == "kto" else []
    lesson = build_objective(ObjectiveInputs(given, config, lm, targets, [0.0] * len(rows)))
    longest = max(len(sequence.ids) for unit in lesson.units for sequence in unit)
    if objective in ("dpo", "ipo", "kto"):
        before = load_language_model(Path(reference), TaskConfig(), "float32")
        with packed_attention(before, longest):
            lesson.prepare(before, Path(out), padded=False)
        del before
    with packed_attention(lm, longest) as packs:
        parts, places = list(micro_batches(list(lesson.units), TOKENS)), iter(range(len(lesson.units)))
        numbers = [[next(places) for _ in part] for part in parts]
        whole, total = lesson.begin_step(lm, numbers), 0.0
        for part, places_of_part in zip(parts, numbers, strict=True):
            loss = lesson.loss(lm, pack(part, padded=not packs), places_of_part)
            (loss.sum / whole).backward()
            total += loss.sum.item()
    (Path(out) / "loss.json").write_text(json.dumps(total / whole), encoding="utf-8")
    weights = lm.model.named_parameters()
    save_file({name: one.grad for name, one in weights if one.grad is not None}, Path(out) / "gradients.safetensors")


def compared(mine: Path, theirs: Path) -> tuple[float, float, float]:
    """Both losses, and the largest difference of a gradient as a share of the largest gradient."""
    from safetensors.torch import load_file

    losses = [json.loads((side / "loss.json").read_bytes()) for side in (mine, theirs)]
    first, second = (load_file(side / "gradients.safetensors") for side in (mine, theirs))
    if first.keys() != second.keys():
        raise SystemExit(f"gradients of one side alone: {sorted(first.keys() ^ second.keys())}")
    largest = max(float(gradient.abs().max()) for gradient in second.values())
    apart = max(float((first[name] - gradient).abs().max()) for name, gradient in second.items())
    return losses[0], losses[1], apart / largest


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
    parser.add_argument("--longest", type=int, default=384, help="Tokens of a pair's longer sequence at most.")
    parser.add_argument("--objectives", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    arguments = parser.parse_args()
    peer = Path(__file__).with_name("peers") / "trl_losses.py"
    print("| objective | loss, ours | loss, TRL | difference | largest difference of a gradient |")
    print("| --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_models(arguments.model, folder)
        given = batches(arguments.model, arguments.gsm8k, arguments.hh, arguments.pairs, arguments.longest)
        for name, rows in given.items():
            if name not in arguments.objectives:
                continue
            batch, sides = folder / "batch.json", [folder / f"{side}-{name}" for side in ("ours", "trl")]
            batch.write_text(json.dumps(rows), encoding="utf-8")
            model = str(folder / "reward") if name == "reward" else arguments.model
            commands = [sys.executable, __file__, "--ours"], [arguments.peer_python, str(peer)]
            for command, side in zip(commands, sides, strict=True):
                side.mkdir()
                call = [*command, name, model, str(folder / "reference"), str(batch), str(side)]
                done = subprocess.run(call, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{name}: {done.stderr}")
            mine, theirs, apart = compared(*sides)
            print(f"| {name} | {mine:.6f} | {theirs:.6f} | {abs(mine - theirs):.1e} | {apart:.1e} |", flush=True)
            for side in sides:
                (side / "gradients.safetensors").unlink()


if __name__ == "__main__":
    main()
