"""The keys and values of other trainers by ours, for the errors of unknown ones.

The names are those of Transformers' ``TrainingArguments``, TRL's configs, peft's ``LoraConfig``, Axolotl and
LLaMA-Factory.
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


_BATCH = Alias("train.batch_size", "examples of an optimiser step; what fits into memory is accumulated by itself")
_EPOCHS = Alias("train.epochs")
_LENGTH = Alias("train.max_length")
_MODEL = Alias("model")
_PRECISION = Alias("train.precision", "bfloat16, float16 or float32")
_BETAS = Alias("train.optimizer.betas", "both in a list")
_RANK = Alias("train.lora.rank")
_TARGETS = Alias("train.lora.targets")
_SCHEDULE = Alias("train.schedule.name")
_RECOMPUTE = Alias("train.recompute.mode")
_METHOD = Alias("train.method", "full or lora")
_LORA = Alias("train.method", "lora, with the keys of train.lora")
_BETA = Alias("train.dpo.beta", "each objective has a section of its own, such as train.ipo.beta")
_OBJECTIVE = Alias("train.objective")
_SMOOTHING = Alias("train.sft.label_smoothing")
_CHECKPOINTS = Alias("train.checkpoint.every_steps", "by default a checkpoint is written each minute")
_COLUMNS = Alias("", "columns are named by `data.columns`, in `posttrain train` by `columns`")
_PACKED = Alias("", "records are always packed, without padding")
_ASSISTANT = Alias("", "the loss is always that of the assistant's turns")
_REFERENCE = Alias("", "the reference is the model before the training, whose log-probabilities are computed once")
_NO_EVALUATION = Alias("", "nothing is evaluated during a training; a loop measures the model of each round")
_METRICS = Alias("", "every step is a line of metrics.jsonl; train.sinks names trackers")
_STOP = Alias("", "train.stop_loss or a callback stops a training early; the result is its last step")
_PLAIN_LORA = Alias("", "adapters are plain LoRA, with the keys of train.lora")
_ONE_PROCESS = Alias("", "a training is one process on one device")
_QUANTISED = Alias("", "models are not loaded in 4 or 8 bits; train.method=lora takes the least memory")
_OUT = Alias("", "`posttrain train` takes the folder as --out, a loop writes into its workspace")
_PUSH = Alias("", "`posttrain models push` uploads a loop's model, `hf upload OWNER/NAME OUT` one of `posttrain train`")
_DATA = Alias("", "`posttrain train` takes it as --data, a loop as `data.pool` and `data.labelled`")
_BOTH_LENGTHS = Alias("train.max_length", "of prompt and answer together")

KEY_ALIASES: dict[str, Alias] = {
    "lr": Alias("train.learning_rate"),
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
    "warmup_ratio": Alias("train.schedule.warmup"),
    "num_warmup_steps": Alias("train.schedule.warmup", "from 1 on a number of steps"),
    "warmup_steps": Alias("train.schedule.warmup", "from 1 on a number of steps"),
    "lr_scheduler_type": _SCHEDULE,
    "lr_scheduler": _SCHEDULE,
    "optim": Alias("train.optimizer.name"),
    "weight_decay": Alias("train.optimizer.weight_decay"),
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "max_grad_norm": Alias("train.clip"),
    "gradient_clipping": Alias("train.clip"),
    "gradient_checkpointing": _RECOMPUTE,
    "torch_compile": Alias("train.compile"),
    "neftune_noise_alpha": Alias("train.noise.neftune"),
    "label_smoothing_factor": _SMOOTHING,
    "dataloader_num_workers": Alias("train.loader.workers"),
    "save_steps": Alias("train.checkpoint.every_steps"),
    "save_total_limit": Alias("train.checkpoint.keep_last"),
    "wandb_project": Alias("train.sinks.wandb"),
    "adapter": _METHOD,
    "finetuning_type": _METHOD,
    "use_peft": _METHOD,
    "lora_r": _RANK,
    "lora_rank": _RANK,
    "r": _RANK,
    "lora_alpha": Alias("train.lora.alpha"),
    "lora_dropout": Alias("train.lora.dropout"),
    "lora_target": _TARGETS,
    "lora_target_modules": _TARGETS,
    "target_modules": _TARGETS,
    "loss_type": _OBJECTIVE,
    "rl": _OBJECTIVE,
    "beta": _BETA,
    "pref_beta": _BETA,
    "rl_beta": _BETA,
    "system_prompt": Alias("task.system"),
    "default_system_message": Alias("task.system"),
    "packing": _PACKED,
    "padding_free": _PACKED,
    "sample_packing": _PACKED,
    "group_by_length": _PACKED,
    "assistant_only_loss": _ASSISTANT,
    "completion_only_loss": _ASSISTANT,
    "train_on_inputs": _ASSISTANT,
    "train_on_prompt": _ASSISTANT,
    "max_steps": Alias("train.phases", "such as [{steps: 100}]"),
    "peft_config": _LORA,
    "lora_config": _LORA,
    "save_strategy": _CHECKPOINTS,
    "resume_from_checkpoint": Alias("", "the same command resumes"),
    "ref_model": _REFERENCE,
    "precompute_ref_log_probs": _REFERENCE,
    "max_prompt_length": _BOTH_LENGTHS,
    "max_completion_length": _BOTH_LENGTHS,
    "simpo_gamma": Alias("train.simpo.gamma"),
    "cpo_alpha": Alias("train.cpo.nll_weight"),
    "eval_dataset": _NO_EVALUATION,
    "eval_strategy": _NO_EVALUATION,
    "evaluation_strategy": _NO_EVALUATION,
    "eval_steps": _NO_EVALUATION,
    "do_eval": _NO_EVALUATION,
    "logging_steps": _METRICS,
    "logging_dir": _METRICS,
    "logging_strategy": _METRICS,
    "report_to": _METRICS,
    "run_name": _METRICS,
    "output_dir": _OUT,
    "train_dataset": _DATA,
    "dataset": _DATA,
    "datasets": _DATA,
    "dataset_name": _DATA,
    "dataset_text_field": _COLUMNS,
    "load_in_4bit": _QUANTISED,
    "load_in_8bit": _QUANTISED,
    "push_to_hub": _PUSH,
    "hub_model_id": _PUSH,
    "label_smoothing": Alias("train.dpo.label_smoothing", "train.sft.label_smoothing for sft"),
    "rpo_alpha": Alias("train.simpo.nll_weight", "simpo and cpo add the loss of the chosen answer"),
    "reference_free": Alias("train.objective", "simpo, cpo and orpo need no reference"),
    "early_stopping_patience": _STOP,
    "load_best_model_at_end": _STOP,
    "metric_for_best_model": _STOP,
    "overwrite_output_dir": _OUT,
    "truncation_mode": Alias("train.too_long", "records that are too long are cut, dropped, or an error"),
    "lr_scheduler_kwargs": Alias("train.schedule.final_rate", "the section train.schedule has a key for each"),
    "disable_dropout": Alias("", "models train with the dropout of train.noise.dropout, none by default"),
    "use_dora": _PLAIN_LORA,
    "use_rslora": _PLAIN_LORA,
    "modules_to_save": _PLAIN_LORA,
    "deepspeed": _ONE_PROCESS,
    "fsdp": _ONE_PROCESS,
    "fsdp_config": _ONE_PROCESS,
    "per_device_eval_batch_size": _NO_EVALUATION,
    "eval_packing": _NO_EVALUATION,
    "dataset_num_proc": Alias("", "records are tokenised once, in the threads of the tokenizer"),
    "auto_find_batch_size": Alias("train.micro_batch_tokens", "auto by default, and halved where memory runs out"),
    "tf32": Alias("", "train.precision alone says what is computed in"),
    "remove_unused_columns": Alias("", "columns that no field names are left out, and named"),
    "sync_ref_model": _REFERENCE,
    "model_init_kwargs": Alias("", "a model is loaded as its folder says, in train.precision"),
    "eos_token": Alias("", "the tokenizer's own; the model is trained on the stop tokens that it is asked with"),
    "pad_token": Alias("", "records are packed without padding"),
    "attn_implementation": Alias("", "attention is always that of packed rows"),
    "use_liger_kernel": Alias("", "the loss never holds all logits"),
}
"""Our key by the name that another trainer has for it."""

_ADAMW, _ADAM8BIT = Alias("adamw"), Alias("adam8bit")
_BFLOAT16, _FLOAT16, _FLOAT32 = Alias("bfloat16"), Alias("float16"), Alias("float32")
_NO_REINFORCEMENT = Alias("", "reinforcement learning is not supported; preferences train with dpo, simpo, orpo or kto")

VALUE_ALIASES: dict[str, dict[str, Alias]] = {
    "train.optimizer.name": {
        "adam": _ADAMW,
        "adamw_torch": _ADAMW,
        "adamw_torch_fused": _ADAMW,
        "adamw_hf": _ADAMW,
        "adamw_8bit": _ADAM8BIT,
        "adamw_bnb_8bit": _ADAM8BIT,
        "paged_adamw_8bit": _ADAM8BIT,
    },
    "train.schedule.name": {
        "constant_with_warmup": Alias("constant", "train.schedule.warmup is its warm-up"),
        "warmup_stable_decay": Alias("wsd"),
    },
    "train.precision": {"bf16": _BFLOAT16, "fp16": _FLOAT16, "fp32": _FLOAT32, "half": _FLOAT16, "float": _FLOAT32},
    "train.objective": {
        "sigmoid": Alias("dpo"),
        "robust": Alias("robust_dpo"),
        "kto_pair": Alias("kto"),
        "grpo": _NO_REINFORCEMENT,
        "ppo": _NO_REINFORCEMENT,
        "rloo": _NO_REINFORCEMENT,
        "online_dpo": _NO_REINFORCEMENT,
    },
}
"""Our value by key and by the value that another trainer has for it."""
