"""Computes TRL's loss and gradients of one batch of token ids, for ``equal_to_trl.py``, in TRL's own environment.

    python trl_losses.py OBJECTIVE MODEL REFERENCE BATCH OUT

``BATCH`` is the JSON file that ``equal_to_trl.py`` writes; the folder ``OUT`` gets ``loss.json`` and
``gradients.safetensors``. The trainers are built with a dummy text: only their collators and losses are used.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

Row = dict[str, Any]

DUMMY_PAIR = {"prompt": "a", "chosen": " b", "rejected": " c"}


def main(objective: str, model: str, reference: str, batch: str, out: str) -> None:
    torch.manual_seed(0)
    rows = json.loads(Path(batch).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as scratch:
        trainer, inputs = BUILDERS[objective](model, reference, rows, scratch)
        loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    (Path(out) / "loss.json").write_text(json.dumps(loss.item()), encoding="utf-8")
    weights = trainer.model.named_parameters()
    save_file(
        {name: weight.grad for name, weight in weights if weight.grad is not None}, Path(out) / "gradients.safetensors"
    )


def language_model(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def common_arguments(folder: str, scratch: str, example: Row, rows: list[Row]) -> tuple[Row, Row]:
    """Return the common arguments of all configs, and those of all trainers."""
    config = {
        "output_dir": scratch, "use_cpu": True, "bf16": False, "report_to": [], "max_length": None,
        "gradient_checkpointing": False, "per_device_train_batch_size": len(rows),
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return config, {"processing_class": tokenizer, "train_dataset": Dataset.from_list([example] * 4)}


def sft(model: str, reference: str, rows: list[Row], scratch: str) -> tuple[Any, Row]:
    config, arguments = common_arguments(model, scratch, {"text": "a"}, rows)
    trainer = SFTTrainer(model=language_model(model), args=SFTConfig(**config), **arguments)
    return trainer, trainer.data_collator(rows)


def dpo(loss_type: str) -> Any:
    def build(model: str, reference: str, rows: list[Row], scratch: str) -> tuple[Any, Row]:
        config, arguments = common_arguments(model, scratch, DUMMY_PAIR, rows)
        args = DPOConfig(**config, loss_type=[loss_type], beta=0.1)
        trainer = DPOTrainer(model=language_model(model), ref_model=language_model(reference), args=args, **arguments)
        return trainer, trainer.data_collator(rows)

    return build


def kto(model: str, reference: str, rows: list[Row], scratch: str) -> tuple[Any, Row]:
    config, arguments = common_arguments(model, scratch, {"prompt": "a", "completion": " b", "label": True}, rows)
    args = KTOConfig(**config, beta=0.1)
    trainer = KTOTrainer(model=language_model(model), ref_model=language_model(reference), args=args, **arguments)
    rows_with_kl = [row | {"KL_completion_ids": rows[index - 1]["completion_ids"]} for index, row in enumerate(rows)]
    return trainer, trainer.data_collator(rows_with_kl)


def padded_rows(rows: list[Row]) -> list[Row]:
    """Return the pairs in the form that the collator of the older trainers takes."""
    result = []
    for row in rows:
        prompt = row["prompt_ids"]
        entry: Row = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
        for side in ("chosen", "rejected"):
            ids = prompt + row[f"{side}_ids"]
            entry[f"{side}_input_ids"], entry[f"{side}_attention_mask"] = ids, [1] * len(ids)
            entry[f"{side}_labels"] = [-100] * len(prompt) + row[f"{side}_ids"]
        result.append(entry)
    return result


def orpo(model: str, reference: str, rows: list[Row], scratch: str) -> tuple[Any, Row]:
    config, arguments = common_arguments(model, scratch, DUMMY_PAIR, rows)
    args = ORPOConfig(**config | {"max_length": 1024}, beta=0.1)
    trainer = ORPOTrainer(model=language_model(model), args=args, **arguments)
    return trainer, trainer.data_collator(padded_rows(rows))


def simpo(model: str, reference: str, rows: list[Row], scratch: str) -> tuple[Any, Row]:
    config, arguments = common_arguments(model, scratch, DUMMY_PAIR, rows)
    loss_options = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.5}
    args = CPOConfig(**config | {"max_length": 1024}, **loss_options)
    trainer = CPOTrainer(model=language_model(model), args=args, **arguments)
    return trainer, trainer.data_collator(padded_rows(rows))


def reward(model: str, reference: str, rows: list[Row], scratch: str) -> tuple[Any, Row]:
    config, arguments = common_arguments(model, scratch, DUMMY_PAIR, rows)
    reward_model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    trainer = RewardTrainer(model=reward_model, args=RewardConfig(**config), **arguments)
    names = ("chosen_ids", "rejected_ids")
    sequences = [{name: row["prompt_ids"] + row[name] for name in names} for row in rows]
    return trainer, trainer.data_collator(sequences)


BUILDERS = {
    "sft": sft, "dpo": dpo("sigmoid"), "ipo": dpo("ipo"), "kto": kto, "orpo": orpo, "simpo": simpo, "reward": reward,
}  # fmt: skip

if __name__ == "__main__":
    main(*sys.argv[1:])
