"""Trains TRL's SFT on examples of token ids, for ``sft_vs_trl.py``, in TRL's own environment; a step for each line.

python trl_sft.py MODEL EXAMPLES STEPS full|lora padded|packed|float32 ROWS LENGTH
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from datasets import Dataset
from timed import StepOnRequest
from trl import SFTConfig, SFTTrainer


class TokenCounter:
    """Returns the tokens of a step; TRL logs their sum since the start of training."""

    total = 0.0

    def __call__(self, logs: Mapping[str, float]) -> float:
        tokens, self.total = logs["num_tokens"] - self.total, logs["num_tokens"]
        return tokens


def main(model: str, examples: str, steps: str, method: str, mode: str, rows: str, length: str) -> None:
    torch.set_num_threads(2)
    packed, adapter = mode == "packed", None
    if method == "lora":
        from peft import LoraConfig

        adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as scratch:
        config = SFTConfig(
            output_dir=scratch, max_steps=int(steps), per_device_train_batch_size=int(rows), packing=packed,
            max_length=int(length) if packed else None, learning_rate=2e-5, lr_scheduler_type="constant",
            bf16=mode != "float32", use_cpu=True, gradient_checkpointing=False, weight_decay=0.0, max_grad_norm=1.0,
            logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
            shuffle_dataset=False, completion_only_loss=True,
            train_sampling_strategy="sequential", model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        data = Dataset.from_list([json.loads(line) for line in Path(examples).read_text(encoding="utf-8").splitlines()])
        SFTTrainer(
            model=model, args=config, train_dataset=data, callbacks=[StepOnRequest(TokenCounter())], peft_config=adapter
        ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
