"""The keys of other trainers by ours, for the errors of unknown keys.

The names are those of Transformers' ``TrainingArguments``, TRL's configs, peft's ``LoraConfig``, Axolotl and
LLaMA-Factory.
"""

from typing import NamedTuple


class KeyAlias(NamedTuple):
    """Our key for another trainer's.

    Args:
        key: Dotted name from the root of the config.
        note: How its value differs; empty if it means the same.
    """

    key: str
    note: str = ""


_BATCH = KeyAlias("train.batch_size", "examples of an optimiser step; what fits into memory is accumulated by itself")
_EPOCHS = KeyAlias("train.epochs")
_LENGTH = KeyAlias("train.max_length")
_MODEL = KeyAlias("model")
_PRECISION = KeyAlias("train.precision", "bfloat16, float16 or float32")
_BETAS = KeyAlias("train.optimizer.betas", "both in a list")
_RANK = KeyAlias("train.lora.rank")
_TARGETS = KeyAlias("train.lora.targets")
_SCHEDULE = KeyAlias("train.schedule.name")
_RECOMPUTE = KeyAlias("train.recompute.mode")
_METHOD = KeyAlias("train.method", "full or lora")
_BETA = KeyAlias("train.dpo.beta", "each objective has a section of its own")
_OBJECTIVE = KeyAlias("train.objective")
_SMOOTHING = KeyAlias("train.sft.label_smoothing")

KEY_ALIASES: dict[str, KeyAlias] = {
    "lr": KeyAlias("train.learning_rate"),
    "num_train_epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "per_device_train_batch_size": _BATCH,
    "per_gpu_train_batch_size": _BATCH,
    "micro_batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "max_seq_length": _LENGTH,
    "max_seq_len": _LENGTH,
    "sequence_len": _LENGTH,
    "cutoff_len": _LENGTH,
    "model_max_length": _LENGTH,
    "model_name_or_path": _MODEL,
    "base_model": _MODEL,
    "model_id": _MODEL,
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "torch_dtype": _PRECISION,
    "dtype": _PRECISION,
    "warmup_ratio": KeyAlias("train.schedule.warmup"),
    "num_warmup_steps": KeyAlias("train.schedule.warmup_steps"),
    "lr_scheduler_type": _SCHEDULE,
    "lr_scheduler": _SCHEDULE,
    "optim": KeyAlias("train.optimizer.name"),
    "weight_decay": KeyAlias("train.optimizer.weight_decay"),
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "adam_epsilon": KeyAlias("train.optimizer.eps"),
    "max_grad_norm": KeyAlias("train.clip"),
    "gradient_clipping": KeyAlias("train.clip"),
    "gradient_checkpointing": _RECOMPUTE,
    "torch_compile": KeyAlias("train.compile"),
    "neftune_noise_alpha": KeyAlias("train.noise.neftune"),
    "label_smoothing_factor": _SMOOTHING,
    "dataloader_num_workers": KeyAlias("train.loader.workers"),
    "save_steps": KeyAlias("train.checkpoint.every_steps"),
    "save_total_limit": KeyAlias("train.checkpoint.keep_last"),
    "wandb_project": KeyAlias("train.sinks.wandb"),
    "adapter": _METHOD,
    "finetuning_type": _METHOD,
    "use_peft": _METHOD,
    "lora_r": _RANK,
    "lora_rank": _RANK,
    "r": _RANK,
    "lora_alpha": KeyAlias("train.lora.alpha"),
    "lora_dropout": KeyAlias("train.lora.dropout"),
    "lora_target": _TARGETS,
    "lora_target_modules": _TARGETS,
    "target_modules": _TARGETS,
    "loss_type": _OBJECTIVE,
    "rl": _OBJECTIVE,
    "beta": _BETA,
    "pref_beta": _BETA,
    "rl_beta": _BETA,
    "system_prompt": KeyAlias("task.system"),
    "default_system_message": KeyAlias("task.system"),
}
"""Our key by the name that another trainer has for it."""
