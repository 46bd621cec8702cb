"""Trains TRL's DPO on pairs of token ids, for ``dpo_vs_trl.py``, in TRL's own environment; a step for each input line.

    python trl_dpo.py MODEL PAIRS STEPS BATCH before|beside

``before`` computes the reference's log-probabilities ahead of the training, ``beside`` keeps the reference in memory.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from timed import StepOnRequest
from trl import DPOConfig, DPOTrainer


class TokenDPOTrainer(DPOTrainer):
    """A trainer for data that are already tokenised."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset


def tokens(row: dict[str, list[int]]) -> int:
    """Count the tokens of both sequences of a pair, with the prompt in each."""
    return 2 * len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"])


def main(model: str, pairs: str, steps: str, batch: str, reference: str) -> None:
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as scratch:
        config = DPOConfig(
            output_dir=scratch, max_steps=int(steps), per_device_train_batch_size=int(batch), beta=0.1,
            precompute_ref_log_probs=reference == "before", learning_rate=1e-5, lr_scheduler_type="constant",
            bf16=True, use_cpu=True, gradient_checkpointing=False, max_length=None, weight_decay=0.0, max_grad_norm=1.0,
            logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, train_sampling_strategy="sequential",
            model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        rows = [json.loads(line) for line in Path(pairs).read_text(encoding="utf-8").splitlines()]
        size = int(batch)
        counts = (sum(map(tokens, rows[start : start + size])) for start in range(0, len(rows), size))
        start = time.perf_counter()
        callback = StepOnRequest(lambda _: next(counts))
        trainer = TokenDPOTrainer(model=model, args=config, train_dataset=Dataset.from_list(rows), callbacks=[callback])
        print(json.dumps({"ahead": time.perf_counter() - start}), flush=True)
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
