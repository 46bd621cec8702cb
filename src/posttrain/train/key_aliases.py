"""The keys and values of other trainers by ours, for the errors of unknown ones.

The names are those of Transformers' ``TrainingArguments``, TRL's configs, peft's ``LoraConfig``, Axolotl and
LLaMA-Factory that people look for first.
"""

from typing import NamedTuple


class Alias(NamedTuple):
    """Our name for another trainer's.

    Args:
        name: Dotted key from the root of the config, or a value; empty if we need none.
        note: How the value differs, or why we need no such name; empty if it means the same.
    """

    name: str
    note: str = ""


_ALIASES: dict[Alias, str] = {
    Alias("train.learning_rate"): "lr",
    Alias("train.epochs"): "num_train_epochs num_epochs",
    Alias("train.batch_size", "examples of an optimiser step; what fits into memory is accumulated by itself"): (
        "per_device_train_batch_size gradient_accumulation_steps micro_batch_size train_batch_size"
    ),
    Alias("train.max_length"): "max_seq_length sequence_len cutoff_len model_max_length",
    Alias("train.max_length", "of prompt and answer together"): "max_prompt_length max_completion_length",
    Alias("train.too_long", "records that are too long are cut, or dropped"): "truncation_mode",
    Alias("model"): "model_name_or_path base_model model_id",
    Alias("train.precision", "bfloat16, float16 or float32"): "bf16 fp16 torch_dtype dtype",
    Alias("train.schedule.warmup"): "warmup_ratio",
    Alias("train.schedule.warmup", "from 1 on a number of steps"): "warmup_steps num_warmup_steps",
    Alias("train.schedule.name"): "lr_scheduler_type lr_scheduler",
    Alias("train.optimizer.name"): "optim",
    Alias("train.optimizer.weight_decay"): "weight_decay",
    Alias("train.optimizer.betas", "both in a list"): "adam_beta1 adam_beta2",
    Alias("train.clip"): "max_grad_norm gradient_clipping",
    Alias("train.recompute"): "gradient_checkpointing",
    Alias("train.compile"): "torch_compile",
    Alias("train.noise.neftune"): "neftune_noise_alpha",
    Alias("train.loader.workers"): "dataloader_num_workers",
    Alias("train.checkpoint.every_steps", "by default a checkpoint is written each minute"): "save_steps save_strategy",
    Alias("train.checkpoint.keep_last"): "save_total_limit",
    Alias("train.sinks.wandb"): "wandb_project",
    Alias("train.method", "full or lora"): "adapter finetuning_type use_peft",
    Alias("train.method", "lora, with the keys of train.lora"): "peft_config lora_config",
    Alias("train.lora.rank"): "lora_r lora_rank r",
    Alias("train.lora.alpha"): "lora_alpha",
    Alias("train.lora.dropout"): "lora_dropout",
    Alias("train.lora.targets"): "lora_target lora_target_modules target_modules",
    Alias("train.objective.name"): "loss_type rl",
    Alias("train.objective.beta"): "beta pref_beta rl_beta",
    Alias("train.objective.label_smoothing"): "label_smoothing label_smoothing_factor",
    Alias("train.objective.gamma"): "simpo_gamma",
    Alias("train.objective.nll_weight", "simpo and cpo add the loss of the chosen answer"): "cpo_alpha rpo_alpha",
    Alias("task.system"): "system_prompt default_system_message",
    Alias("", "records are always packed, without padding"): "packing padding_free sample_packing group_by_length",
    Alias("", "the loss is always that of the assistant's turns"): (
        "assistant_only_loss completion_only_loss train_on_inputs train_on_prompt"
    ),
    Alias("", "the reference is the model before the training, whose log-probabilities are computed once"): (
        "ref_model precompute_ref_log_probs reference_free"
    ),
    Alias("", "the same command resumes"): "resume_from_checkpoint",
    Alias("train.evaluate.data", "a file, or a share of the training records"): (
        "eval_dataset val_set_size val_size test_size"
    ),
    Alias("train.evaluate.every", "in steps; null: each epoch"): (
        "eval_strategy evaluation_strategy eval_steps do_eval evals_per_epoch"
    ),
    Alias("train.evaluate.metrics", "the first one decides which evaluation is best"): (
        "metric_for_best_model compute_metrics"
    ),
    Alias("train.evaluate.patience"): "early_stopping_patience",
    Alias("train.evaluate.patience", "with it the result has the weights of the best evaluation"): (
        "load_best_model_at_end"
    ),
    Alias("", "a lower loss is better, and of scorers' metrics a higher value"): "greater_is_better",
    Alias("", "evaluation reads as many tokens at once as the training"): "per_device_eval_batch_size eval_batch_size",
    Alias("", "every step is a line of metrics.jsonl; train.sinks names trackers"): "logging_steps report_to",
    Alias("", "`posttrain train` takes the folder as --out, a loop writes into its workspace"): "output_dir",
    Alias("", "`posttrain train` takes it as --data, a loop as `data.pool` and `data.labelled`"): (
        "train_dataset dataset datasets dataset_name"
    ),
    Alias("", "columns are named by `data.columns`, in `posttrain train` by `columns`"): "dataset_text_field",
    Alias("", "models are not loaded in 4 or 8 bits; train.method=lora takes the least memory"): (
        "load_in_4bit load_in_8bit quantization quantization_bit quantization_config"
    ),
    Alias("", "adapters are plain LoRA, with the keys of train.lora"): "use_dora use_rslora modules_to_save",
    Alias("", "a training is one process on one device"): "deepspeed fsdp fsdp_config",
}

KEY_ALIASES: dict[str, Alias] = {name: alias for alias, names in _ALIASES.items() for name in names.split()}
"""Our key by the name that another trainer has for it."""

_NO_REINFORCEMENT = Alias("", "reinforcement learning is not supported; preferences train with dpo, simpo, orpo or kto")

VALUE_ALIASES: dict[str, dict[str, Alias]] = {
    "train.method": {
        "qlora": Alias("lora", "models are not loaded in 4 or 8 bits, and lora takes the least memory"),
        **dict.fromkeys(("dora", "rslora", "adapter", "peft"), Alias("lora", "adapters are plain LoRA")),
        **dict.fromkeys(("sft", "full_finetuning"), Alias("full")),
    },
    "train.optimizer.name": {
        **dict.fromkeys(("adam", "adamw_torch", "adamw_torch_fused"), Alias("adamw")),
        **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), Alias("adam8bit")),
    },
    "train.schedule.name": {
        "constant_with_warmup": Alias("constant", "train.schedule.warmup is its warm-up"),
        "warmup_stable_decay": Alias("wsd"),
    },
    "train.precision": {
        **{"bf16": Alias("bfloat16"), "fp32": Alias("float32")},
        **dict.fromkeys(("fp16", "half"), Alias("float16")),
    },
    "train.objective": {
        **{"sigmoid": Alias("dpo"), "robust": Alias("robust_dpo"), "kto_pair": Alias("kto")},
        **dict.fromkeys(("grpo", "ppo", "rloo", "online_dpo"), _NO_REINFORCEMENT),
    },
}
"""Our value by key and by the value that another trainer has for it."""
