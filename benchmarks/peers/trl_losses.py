"""TRL's loss and gradient of one batch of token ids: run by ``equal_to_trl.py`` in TRL's own environment.

    python trl_losses.py OBJECTIVE MODEL REFERENCE BATCH OUT

``BATCH`` is JSON as ``equal_to_trl.py`` writes it; ``EXCLUDED`` gets ``loss.json`` and ``gradients.safetensors``. The
trainers are made with a text that is never used: only their collators and their losses are.
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

PAIR = {"prompt": "a", "chosen": " b", "rejected": " c"}


def main(objective: str, model: str, reference: str, batch: str, out: str) -> None:
    torch.manual_seed(0)
    rows = json.loads(Path(batch).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as scratch:
        trainer, inputs = MAKERS[objective](model, reference, rows, scratch)
        loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    (Path(out) / "loss.json").write_text(json.dumps(loss.item()), encoding="utf-8")
    weights = trainer.model.named_parameters()
    save_file({name: one.grad for name, one in weights if one.grad is not None}, Path(out) / "gradients.safetensors")


def language_model(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def common(folder: str, scratch: str, example: Row, rows: list[Row]) -> tuple[Row, Row]:
    """Arguments of every config, and of every trainer."""
    config = {
        "output_dir": scratch, "use_cpu": True, "bf16": False, "report_to": [], "max_length": None,
        "gradient_checkpointing": False, "per_device_train_batch_size": len(rows),
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return config, {"processing_class": tokenizer, "train_dataset": Dataset.from_list([example] * 4)}


def sft(model: str, reference: str, rows: list[Row], scratch: str) -> tuple[Any, Row]:
    config, more = common(model, scratch, {"text": "a"}, rows)
    trainer = SFTTrainer(model=language_model(model), args=SFTConfig(**config), **more)
    return trainer, trainer.data_collator(rows)


def dpo(loss_type: str) -> Any:
    def make(model: str, reference: str, rows: list[Row], scratch: str) -> tuple[Any, Row]:
        config, more = common(model, scratch, PAIR, rows)
        args = DPOConfig(**config, loss_type=[loss_type], beta=0.1)
        trainer = DPOTrainer(model=language_model(model), ref_model=language_model(reference), args=args, **more)
        return trainer, trainer.data_collator(rows)

    return make


def kto(model: str, reference: str, rows: list[Row], scratch: str) -> tuple[Any, Row]:
    config, more = common(model, scratch, {"prompt": "a", "completion": " b", "label": True}, rows)
    args = KTOConfig(**config, beta=0.1)
    trainer = KTOTrainer(model=language_model(model), ref_model=language_model(reference), args=args, **more)
    turned = [row | {"KL_completion_ids": rows[place - 1]["completion_ids"]} for place, row in enumerate(rows)]
    return trainer, trainer.data_collator(turned)


def padded(rows: list[Row]) -> list[Row]:
    """The pairs as the collator of the older trainers takes them."""
    found = []
    for row in rows:
        asked = row["prompt_ids"]
        one: Row = {"prompt_input_ids": asked, "prompt_attention_mask": [1] * len(asked)}
        for side in ("chosen", "rejected"):
            ids = asked + row[f"{side}_ids"]
            one[f"{side}_input_ids"], one[f"{side}_attention_mask"] = ids, [1] * len(ids)
            one[f"{side}_labels"] = [-100] * len(asked) + row[f"{side}_ids"]
        found.append(one)
    return found


def orpo(model: str, reference: str, rows: list[Row], scratch: str) -> tuple[Any, Row]:
    config, more = common(model, scratch, PAIR, rows)
    args = ORPOConfig(**config | {"max_length": 1024}, beta=0.1)
    trainer = ORPOTrainer(model=language_model(model), args=args, **more)
    return trainer, trainer.data_collator(padded(rows))


def simpo(model: str, reference: str, rows: list[Row], scratch: str) -> tuple[Any, Row]:
    config, more = common(model, scratch, PAIR, rows)
    chosen = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.5}
    trainer = CPOTrainer(model=language_model(model), args=CPOConfig(**config | {"max_length": 1024}, **chosen), **more)
    return trainer, trainer.data_collator(padded(rows))


def reward(model: str, reference: str, rows: list[Row], scratch: str) -> tuple[Any, Row]:
    config, more = common(model, scratch, PAIR, rows)
    found = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    trainer = RewardTrainer(model=found, args=RewardConfig(**config), **more)
    whole = [{f"{side}_ids": row["prompt_ids"] + row[f"{side}_ids"] for side in ("chosen", "rejected")} for row in rows]
    return trainer, trainer.data_collator(whole)


MAKERS = {
    "sft": sft, "dpo": dpo("sigmoid"), "ipo": dpo("ipo"), "kto": kto, "orpo": orpo, "simpo": simpo, "reward": reward,
}  # fmt: skip

if __name__ == "__main__":
    main(*sys.argv[1:])
