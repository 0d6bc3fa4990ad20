"""transformers' TrainingArguments, as TRL's configs have them (TRL 1.16, transformers 5.24): name, default, where it stands."""

from __future__ import annotations

from corrente.trl.argument import Argument, implied, key, refused, rule

NO_LOADER = "there is no data loader: prompts are drawn one by one, as slots come free"
ONE_LEARNER = "one learner process; more devices are `backend.kind`, which has none of this yet"
FLOATS = "matrix products run in bfloat16 or float32; parameters and optimizer are float32: bf16=True or bf16=False"
EVALUATION = "evaluation generates and scores; no forward pass of a loss to be configured"

TRAINING: tuple[Argument, ...] = (
    # ---- where it writes, how long it trains
    rule(
        "output_dir",
        None,
        "run.dir",
        "runs are in OUTPUT_DIR/runs, checkpoints also as OUTPUT_DIR/checkpoint-N",
        type=str | None,
    ),
    rule(
        "per_device_train_batch_size",
        8,
        "run.prompts_per_step",
        "times gradient_accumulation_steps, over num_generations",
    ),
    rule(
        "gradient_accumulation_steps",
        1,
        "run.prompts_per_step",
        "see per_device_train_batch_size; micro-batches are cut by tokens",
    ),
    rule(
        "num_train_epochs", 3.0, "run.steps", "times the rows of the dataset; a last step may be smaller. See max_steps"
    ),
    rule("max_steps", -1, "run.steps", "over num_iterations; above 0 the dataset is repeated as often as it takes"),
    # ---- optimizer
    key("learning_rate", 1e-6, "learner.lr"),
    rule(
        "lr_scheduler_type",
        "linear",
        "learner.schedule",
        "linear, cosine, constant, constant_with_warmup",
        asynchronous="constant",
    ),
    refused(
        "lr_scheduler_kwargs", None, "the schedules have no parameters but the warm-up", {}, type=dict | str | None
    ),
    rule("warmup_steps", 0, "learner.warmup_steps", "below 1: that part of all steps", type=float),
    refused("optim", "adamw_torch_fused", "AdamW is the optimizer; see the section learner", "adamw_torch"),
    refused(
        "optim_args",
        None,
        "AdamW's parameters are adam_beta1, adam_beta2, adam_epsilon and weight_decay",
        type=str | None,
    ),
    key("weight_decay", 0.0, "learner.weight_decay", "of all parameters but norms and biases"),
    rule("adam_beta1", 0.9, "learner.betas", "the first"),
    rule("adam_beta2", 0.999, "learner.betas", "the second"),
    key("adam_epsilon", 1e-8, "learner.eps"),
    refused(
        "optim_target_modules",
        None,
        "all parameters have one optimizer; peft_config trains some alone",
        type=str | None,
    ),
    implied("average_tokens_across_devices", True, "one denominator for all tokens of a step"),
    key("max_grad_norm", 1.0, "learner.max_grad_norm"),
    refused("label_smoothing_factor", 0.0, "there are no labels"),
    # ---- precision and memory
    rule(
        "bf16", None, "model.dtype", "None: bfloat16 where an accelerator has it, float32 elsewhere", type=bool | None
    ),
    refused("fp16", False, FLOATS),
    refused("bf16_full_eval", False, FLOATS),
    refused("fp16_full_eval", False, FLOATS),
    refused("tf32", None, "set torch.backends.cuda.matmul.allow_tf32 where the learner starts", type=bool | None),
    rule(
        "activation_checkpointing",
        None,
        "learner.gradient_checkpointing",
        "None: as gradient_checkpointing says",
        type=bool | None,
    ),
    refused(
        "activation_checkpointing_kwargs",
        None,
        "activations are recomputed without reentrance",
        {},
        type=dict | str | None,
    ),
    rule(
        "gradient_checkpointing",
        True,
        "learner.gradient_checkpointing",
        "unless activation_checkpointing says otherwise",
    ),
    refused(
        "gradient_checkpointing_kwargs",
        None,
        "activations are recomputed without reentrance",
        {},
        {"use_reentrant": False},
        type=dict | str | None,
    ),
    refused("torch_compile", False, "the forward pass is over prefix trees of ever other shapes"),
    refused("torch_compile_backend", None, "see torch_compile", type=str | None),
    refused("torch_compile_mode", None, "see torch_compile", type=str | None),
    refused(
        "use_liger_kernel", False, "the learner has its own output layer; see learner.micro_batch_tokens for memory"
    ),
    refused("liger_kernel_config", None, "see use_liger_kernel", {}, type=dict | str | None),
    implied("use_cache", False, "engines have a key/value cache, the learner has none"),
    refused("neftune_noise_alpha", None, "the policy that is trained must be the one that sampled", type=float | None),
    refused("torch_empty_cache_steps", None, "memory is bounded by learner.micro_batch_tokens", type=int | None),
    refused("auto_find_batch_size", False, "learner.micro_batch_tokens bounds memory and does not change the gradient"),
    # ---- logs
    rule("logging_strategy", "steps", "state.log_history", "no, steps, epoch; metrics.jsonl has every step"),
    rule(
        "logging_steps",
        10,
        "state.log_history",
        "means over these steps; below 1: that part of all steps",
        asynchronous=1,
        type=float,
    ),
    rule("logging_first_step", False, "state.log_history", "the first step besides"),
    implied("log_on_each_node", True, "one controller logs"),
    implied("logging_nan_inf_filter", True, "a loss that is not finite ends the run, with an error"),
    implied("include_num_input_tokens_seen", "no", "num_tokens is always logged"),
    implied("log_level", "passive", "the library logs nothing; warnings go to events.jsonl"),
    implied("log_level_replica", "warning", "see log_level"),
    rule("disable_tqdm", None, "callbacks", "true: PrinterCallback in place of ProgressCallback", type=bool | None),
    rule("report_to", "none", "observe.trackers", "tensorboard, wandb, trackio; a name or a list", type=str),
    rule(
        "run_name",
        None,
        "run.name",
        'the folder in OUTPUT_DIR/runs, and the run\'s name in trackers; None: "train"',
        type=str | None,
    ),
    rule("project", "huggingface", "observe.project", "of wandb and trackio"),
    refused("trackio_space_id", None, "trackio writes locally; `trackio sync` copies it to a Space", type=str | None),
    refused("trackio_bucket_id", None, "see trackio_space_id", type=str | None),
    refused("trackio_static_space_id", None, "see trackio_space_id", False, type=str | None),
    # ---- evaluation
    rule("eval_strategy", "no", "eval.every", "no, steps, epoch"),
    rule(
        "eval_steps",
        None,
        "eval.every",
        "in steps; None: logging_steps; below 1: that part of all steps",
        type=float | None,
    ),
    refused("eval_delay", 0, "evaluation begins with the first eval_steps"),
    implied("per_device_eval_batch_size", 8, "held-out prompts are generated beside training, eval.at_once at a time"),
    implied("prediction_loss_only", False, EVALUATION),
    key("eval_on_start", False, "eval.at_start"),
    implied("eval_do_concat_batches", True, EVALUATION),
    implied("eval_use_gather_object", False, EVALUATION),
    implied("eval_accumulation_steps", None, EVALUATION, type=int | None),
    implied("include_for_metrics", (), EVALUATION, type=list[str]),
    implied("batch_eval_metrics", False, EVALUATION),
    # ---- checkpoints and the hub
    refused(
        "save_only_model",
        False,
        "a checkpoint resumes exactly, so it holds everything; save_model() writes the model alone",
    ),
    rule("save_strategy", "steps", "checkpoint.every", "no, steps, epoch; a run always ends with a checkpoint"),
    rule("save_steps", 500, "checkpoint.every", "in steps; below 1: that part of all steps", type=float),
    implied("save_on_each_node", False, "one controller writes"),
    rule("save_total_limit", None, "checkpoint.keep", "None: all are kept", type=int | None),
    implied("enable_jit_checkpoint", False, "SIGTERM stops at the next version with a checkpoint in any case"),
    rule("push_to_hub", False, "push_to_hub()", "called once, after train()"),
    rule("hub_token", None, "push_to_hub()", "None: the one huggingface_hub finds", type=str | None),
    rule("hub_private_repo", None, "push_to_hub()", "", type=bool | None),
    rule("hub_model_id", None, "push_to_hub()", "None: the name of output_dir", type=str | None),
    refused("hub_strategy", "every_save", "the model is pushed once, at the end", "end"),
    implied("hub_always_push", False, "the model is pushed once, at the end"),
    refused("hub_revision", None, "the model is pushed to the main branch", type=str | None),
    refused("load_best_model_at_end", False, "every checkpoint is a model folder: load OUTPUT_DIR/checkpoint-N"),
    rule(
        "metric_for_best_model",
        None,
        "state.best_metric",
        "followed at every evaluation, for EarlyStoppingCallback",
        type=str | None,
    ),
    rule(
        "greater_is_better", None, "state.best_metric", "None: unless the metric's name ends in loss", type=bool | None
    ),
    implied(
        "ignore_data_skip",
        False,
        "the position in the data is restored exactly, without reading it again",
        asynchronous=True,
    ),
    refused("restore_callback_states_from_checkpoint", False, "checkpoints hold no callbacks; make them anew"),
    implied("resume_from_checkpoint", None, "for scripts, as in transformers: pass it to train()", type=str | None),
    # ---- seeds and devices
    refused(
        "full_determinism",
        False,
        "GRPOTrainer repeats itself bit for bit as it is; asynchronous runs depend on what arrives first",
    ),
    key("seed", 42, "run.seed"),
    refused("data_seed", None, "one seed decides prompts, their order and every token", type=int | None),
    rule("use_cpu", False, "model.device", "a GPU is used where there is one, unless this is True"),
    refused("accelerator_config", None, ONE_LEARNER, {}, type=dict | str | None),
    refused("parallelism_config", None, ONE_LEARNER),
    refused("ddp_find_unused_parameters", None, ONE_LEARNER, False, type=bool | None),
    refused("ddp_bucket_cap_mb", None, ONE_LEARNER, type=int | None),
    refused("ddp_broadcast_buffers", None, ONE_LEARNER, type=bool | None),
    refused("ddp_static_graph", None, ONE_LEARNER, type=bool | None),
    refused("ddp_backend", None, ONE_LEARNER, type=str | None),
    refused("ddp_timeout", 1800, ONE_LEARNER),
    refused("fsdp", None, ONE_LEARNER, "", [], False, type=str | None),
    refused("fsdp_config", None, ONE_LEARNER, {}, type=dict | str | None),
    refused("deepspeed", None, ONE_LEARNER, type=str | None),
    implied("local_rank", -1, "one learner process"),
    refused("debug", "", "see timeline.jsonl and events.jsonl in the run folder", []),
    implied("skip_memory_metrics", True, "memory is not measured"),
    # ---- data
    implied("dataloader_drop_last", False, NO_LOADER),
    implied("dataloader_num_workers", 0, NO_LOADER),
    implied("dataloader_pin_memory", True, NO_LOADER),
    implied("dataloader_persistent_workers", False, NO_LOADER),
    implied("dataloader_prefetch_factor", None, NO_LOADER, type=int | None),
    implied("dataloader_multiprocessing_context", None, NO_LOADER, type=str | None),
    implied("dataloader_in_order", True, NO_LOADER),
    refused(
        "remove_unused_columns",
        False,
        "reward functions are given all columns; drop some with dataset.remove_columns",
        False,
        asynchronous=True,
    ),
    implied("label_names", None, "there are no labels", type=list[str] | None),
    refused(
        "train_sampling_strategy",
        "random",
        "an epoch is in random order, or with shuffle_dataset=False in the dataset's",
    ),
    implied("length_column_name", "length", "rows are not grouped by length"),
    implied("do_train", False, "for scripts, as in transformers"),
    implied("do_eval", False, "for scripts, as in transformers"),
    implied("do_predict", False, "for scripts, as in transformers"),
)
