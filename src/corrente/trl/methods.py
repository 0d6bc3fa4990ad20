"""TRL's arguments of GRPOConfig and AsyncGRPOConfig beside TrainingArguments (TRL 1.16): name, default, where it stands."""

from __future__ import annotations

from corrente.trl.argument import Argument, hint, implied, key, refused, rule

SEGMENT = "vLLM's own server, launched or attached to, serves the run"
ADAPTIVE = "only for use_adaptive_entropy, which is refused"

SHARED: tuple[Argument, ...] = (
    # ---- the model
    rule(
        "model_init_kwargs",
        None,
        "model.dtype",
        "dtype, trust_remote_code, and where files of the hub come from; how a model is loaded is a hint",
        type=dict | str | None,
    ),
    rule(
        "trust_remote_code",
        False,
        "model.trust_remote_code",
        "or in model_init_kwargs; of reward models too. False: what needs code of its own is refused",
    ),
    rule(
        "router_aux_loss_coef",
        None,
        "learner.router_aux_loss_coef",
        "of a mixture of experts; None: no balancing loss",
        type=float | None,
    ),
    # ---- generation
    rule(
        "max_prompt_length",
        None,
        "prompts.max_prompt_tokens",
        "deprecated: of a longer prompt the last so many tokens are kept; plain completions only",
        type=int | None,
    ),
    key("num_generations", 8, "run.group_size"),
    key("max_completion_length", 512, "sampling.max_tokens", asynchronous=2048),
    key("temperature", 1.0, "sampling.temperature", "evaluation likewise"),
    key("top_p", 1.0, "sampling.top_p", "evaluation likewise"),
    key("top_k", 0, "sampling.top_k", "evaluation likewise"),
    rule("min_p", None, "sampling.min_p", "None: 0; evaluation likewise", type=float | None),
    refused(
        "repetition_penalty",
        1.0,
        "it depends on all tokens before, which the learner's log-probs would have to follow",
        1,
    ),
    rule("chat_template_kwargs", None, "chat.template_kwargs", "", type=dict | str | None),
    rule(
        "max_tool_calling_iterations",
        None,
        "env.max_turns",
        "one more than these; None: as many as fit",
        type=int | None,
    ),
    rule(
        "vllm_server_base_url",
        None,
        "engine.urls",
        "with vllm_mode server. AsyncGRPOConfig: vLLM is used if it is given, the embedded engine otherwise",
        asynchronous="http://localhost:8000",
        type=str | None,
    ),
    rule("vllm_server_timeout", 240.0, "engine.start_deadline_s", "with vLLM"),
    # ---- objective
    rule("epsilon", 0.2, "algo.objective.epsilon", "where loss_type has a clip"),
    rule("epsilon_high", None, "algo.objective.epsilon_high", "None: epsilon", type=float | None),
    rule(
        "log_completions",
        False,
        "observe.samples",
        "true: all of a step go to samples.jsonl and to trackers; nothing is printed",
    ),
    rule("num_completions_to_print", None, "observe.samples", "with log_completions: this many", type=int | None),
)

GRPO: tuple[Argument, ...] = (
    implied(
        "disable_dropout", False, "dropout is off in any case: the policy that is trained must be the one that sampled"
    ),
    hint(
        "cast_lm_head_to_fp32", False, "softmax and loss are float32; bf16=False makes the output layer float32 as well"
    ),
    rule("num_generations_eval", None, "eval.samples", "None: num_generations", type=int | None),
    implied("ds3_gather_for_generation", True, "only for DeepSpeed, which is refused"),
    rule("shuffle_dataset", True, "prompts.shuffle", ""),
    implied("pad_to_multiple_of", "auto", "nothing is padded"),
    rule(
        "generation_batch_size",
        None,
        "sync.every",
        "over the size of a step; see steps_per_generation",
        type=int | None,
    ),
    rule(
        "steps_per_generation",
        None,
        "sync.every",
        "over gradient_accumulation_steps: steps from one generation; AsyncGRPOConfig has weight_sync_steps",
        type=int | None,
    ),
    rule(
        "generation_kwargs",
        None,
        "sampling",
        "temperature, top_p, top_k, min_p, max_tokens, stop, stop_token_ids; evaluation likewise",
        type=dict | str | None,
    ),
    hint("cache_implementation", None, "engines have a cache of their own", type=str | None),
    rule("use_vllm", False, "engine.kind", 'true: "vllm"; false: "embedded"'),
    rule(
        "vllm_mode",
        "colocate",
        "engine.urls",
        "server: attach; colocate: launch a server beside the learner",
        asynchronous="server",
    ),
    rule("vllm_model_impl", "vllm", "engine.args", "of a launched server"),
    hint("vllm_enable_sleep_mode", False, "generation goes on while the learner works"),
    refused(
        "vllm_structured_outputs_regex",
        None,
        "tokens that a grammar excludes have no log-prob to learn from",
        type=str | None,
    ),
    rule("vllm_server_host", "0.0.0.0", "engine.urls", "with vllm_mode server, unless vllm_server_base_url is given"),
    rule("vllm_server_port", 8000, "engine.urls", "see vllm_server_host"),
    implied("vllm_group_port", 51216, "how weights travel is sync.kind; ports are chosen by it"),
    rule("vllm_gpu_memory_utilization", 0.3, "engine.args", "of a launched server"),
    rule("vllm_max_model_length", None, "engine.max_context", "of a launched server", type=int | None),
    rule("vllm_tensor_parallel_size", 1, "engine.args", "of a launched server"),
    key("beta", 0.0, "algo.beta"),
    key("num_iterations", 1, "algo.num_iterations", "state.global_step counts updates, as TRL does"),
    rule("delta", None, "algo.objective.delta", "where loss_type has a clip; None: off", type=float | None),
    rule("sapo_temperature_neg", 1.05, "algo.objective.temperature_neg", "with loss_type sapo"),
    rule("sapo_temperature_pos", 1.0, "algo.objective.temperature_pos", "with loss_type sapo"),
    rule("vespo_k_pos", 2.0, "algo.objective.k_pos", "with loss_type vespo"),
    rule("vespo_lambda_pos", 3.0, "algo.objective.lambda_pos", "with loss_type vespo"),
    rule("vespo_k_neg", 3.0, "algo.objective.k_neg", "with loss_type vespo"),
    rule("vespo_lambda_neg", 2.0, "algo.objective.lambda_neg", "with loss_type vespo"),
    rule(
        "importance_sampling_level", "token", "algo.objective.importance_sampling_level", "sequence: what luspo needs"
    ),
    rule(
        "reward_weights",
        None,
        "reward.weights",
        "one per reward; models have theirs in reward.scorers",
        type=list[float] | None,
    ),
    rule(
        "multi_objective_aggregation",
        "sum_then_normalize",
        "algo.advantage.kind",
        "sum_then_normalize: grpo; normalize_then_sum: gdpo",
    ),
    rule("scale_rewards", "group", "algo.advantage.scale_rewards", "true is group, false is none", type=str),
    rule("loss_type", "dapo", "algo.objective.kind", "corrente={'algo.objective.kind': ...} has more"),
    key("mask_truncated_completions", False, "algo.mask_truncated"),
    rule("sync_ref_model", False, "algo.ref_model_sync_steps", "true: the reference follows; needs beta above 0"),
    rule("ref_model_mixup_alpha", 0.6, "algo.ref_model_mixup_alpha", "with sync_ref_model"),
    rule("ref_model_sync_steps", 512, "algo.ref_model_sync_steps", "with sync_ref_model"),
    key("top_entropy_quantile", 1.0, "algo.top_entropy_quantile"),
    key("entropy_coef", 0.0, "algo.entropy_coef"),
    refused("use_adaptive_entropy", False, "give entropy_coef a value"),
    implied("entropy_coef_min", 0.0, ADAPTIVE),
    implied("entropy_coef_max", 1.0, ADAPTIVE),
    implied("entropy_coef_delta", 0.005, ADAPTIVE),
    implied("entropy_target", 0.2, ADAPTIVE),
    rule(
        "vllm_importance_sampling_correction",
        True,
        "staleness.correct",
        "with vLLM. AsyncGRPOConfig: false, for TRL's trainer takes its ratio to the policy that sampled",
        asynchronous=False,
    ),
    rule(
        "vllm_importance_sampling_mode",
        "sequence_mask",
        "staleness.correct_level",
        "see vllm_importance_sampling_correction",
    ),
    rule(
        "vllm_importance_sampling_clip_max",
        3.0,
        "staleness.correct_cap",
        "see vllm_importance_sampling_correction",
        type=float | None,
    ),
    rule(
        "vllm_importance_sampling_clip_min",
        None,
        "staleness.correct_floor",
        "see vllm_importance_sampling_correction",
        type=float | None,
    ),
    rule(
        "vllm_importance_sampling_cap", None, "staleness.correct_cap", "TRL's older name of clip_max", type=float | None
    ),
    rule("off_policy_mask_threshold", None, "staleness.off_policy_mask_threshold", "None: off", type=float | None),
    rule("use_bias_correction_kl", True, "algo.use_bias_correction_kl", "with beta above 0"),
    implied("log_multimodal", True, "prompts are text"),
    hint("log_unique_prompts", False, "samples.jsonl and the trackers' tables show completions"),
    hint("log_completions_hub_repo", None, "completions are in samples.jsonl of the run folder", type=str | None),
    implied("use_transformers_continuous_batching", False, "the embedded engine batches continuously in any case"),
    hint("transformers_continuous_batching_config", None, "see the section engine", {}, type=dict | str | None),
    implied("use_transformers_paged", False, "see use_transformers_continuous_batching"),
)

ASYNC: tuple[Argument, ...] = (
    rule(
        "dtype",
        "float32",
        "model.dtype",
        "of what is loaded: float32, or auto; see bf16 for matrix products",
        owner="async",
    ),
    implied(
        "fork_threshold_tokens",
        1024,
        "sampled ids are never tokenised again; a rewritten history always forks a row",
        owner="async",
    ),
    rule("request_timeout", 600, "engine.request_deadline_s", "with vLLM; GRPOConfig: none", owner="async"),
    rule("weight_sync_timeout", 1800, "sync.deadline_s", "", owner="async"),
    rule(
        "token_budget",
        None,
        "learner.micro_batch_tokens",
        "None: its default; it does not change the gradient",
        type=int | None,
        owner="async",
    ),
    rule(
        "max_inflight_tasks",
        -1,
        "engine.max_sequences",
        "-1: its default; admission is bounded by max_staleness",
        owner="async",
    ),
    rule(
        "max_staleness",
        4,
        "staleness.max",
        "kept by admission, so nothing is generated to be thrown away",
        owner="async",
    ),
    implied("queue_maxsize", 1024, "slots bound what waits: (max_staleness + 1) x prompts of a version", owner="async"),
    key("weight_sync_steps", 1, "sync.every", owner="async"),
    rule(
        "heartbeat_stale_after_s",
        300.0,
        "limits.watchdog_s",
        "at least its default, which rewards and tools may need; a process that died is noticed at once",
        owner="async",
    ),
)

ELSEWHERE: dict[str, str] = {
    "eval_temperature": "corrente={'eval.temperature': ...}",
    "evaluation_strategy": "eval_strategy",
    "logging_dir": "output_dir: trackers write into the run folder",
    "max_new_tokens": "max_completion_length",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "torch_dtype": "model_init_kwargs={'dtype': ...}",
    "wandb_project": "project",
}
"""Names that scripts for other versions use, and what to write."""
