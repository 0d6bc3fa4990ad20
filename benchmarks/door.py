"""How many settings and constructor calls of TRL scripts are taken: counted, and those that are not with the reason.

    python benchmarks/door.py [--verbose] [--json FILE]

Each line is what the documentation of TRL, transformers or peft shows, beside the least that a trainer needs. A trainer is made
on a tiny model; nothing is trained. "hint": taken, with a line that says it has no effect here.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from corrente import GRPOConfig, GRPOTrainer
from corrente.errors import CorrenteError

LETTERS = "abcdefgh0123456789+= \n"
SETTINGS: tuple[dict[str, Any], ...] = (
    {"learning_rate": 1e-5, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1},
    {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2},
    {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
    {"lr_scheduler_type": "inverse_sqrt"},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-7}},
    {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2}},
    {"optim": "adamw_torch"},
    {"optim": "adamw_8bit"},
    {"optim": "paged_adamw_8bit"},
    {"optim": "adafactor"},
    {"optim": "sgd", "optim_args": "momentum=0.9"},
    {"adam_beta1": 0.9, "adam_beta2": 0.99, "weight_decay": 0.1, "max_grad_norm": 0.1},
    {"max_grad_norm": None},
    {"bf16": True},
    {"fp16": True},
    {"tf32": True},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"torch_compile": True},
    {"use_liger_kernel": True},
    {"auto_find_batch_size": True},
    {"torch_empty_cache_steps": 4},
    {"max_prompt_length": 16},
    {"max_completion_length": 32, "temperature": 0.7, "top_p": 0.95, "top_k": 50},
    {"generation_kwargs": {"min_p": 0.1}},
    {"generation_kwargs": {"stop": ["\n"]}},
    {"repetition_penalty": 1.1},
    {"num_generations": 2},
    {"num_generations": 3, "per_device_train_batch_size": 3},
    {"num_generations": 4, "per_device_train_batch_size": 6},
    {"num_iterations": 2},
    {"num_iterations": 2, "max_steps": 3},
    {"steps_per_generation": 4},
    {"beta": 0.04},
    {"beta": 0.0},
    {"beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 8},
    {"epsilon": 0.2, "epsilon_high": 0.28},
    {"delta": 1.5},
    {"loss_type": "grpo"},
    {"loss_type": "bnpo"},
    {"loss_type": "dr_grpo"},
    {"loss_type": "cispo"},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "sapo"},
    {"loss_type": "vespo"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"importance_sampling_level": "sequence"},
    {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    {"scale_rewards": False},
    {"scale_rewards": "batch"},
    {"mask_truncated_completions": True},
    {"top_entropy_quantile": 0.2},
    {"use_adaptive_entropy": True},
    {"cast_lm_head_to_fp32": True},
    {"router_aux_loss_coef": 0.0},
    {"disable_dropout": True},
    {"shuffle_dataset": False},
    {"log_completions": True, "num_completions_to_print": 2},
    {"log_unique_prompts": True},
    {"logging_steps": 3, "logging_first_step": True},
    {"save_strategy": "epoch", "save_total_limit": 2},
    {"save_only_model": True},
    {
        "load_best_model_at_end": True,
        "metric_for_best_model": "reward",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
    },
    {"report_to": "tensorboard"},
    {"report_to": "wandb", "run_name": "first"},
    {"report_to": []},
    {"seed": 1, "data_seed": 2},
    {"full_determinism": True},
    {"push_to_hub": False, "hub_strategy": "end", "hub_revision": "trained"},
    {"dataloader_num_workers": 4, "dataloader_pin_memory": False},
    {"remove_unused_columns": False},
    {"ddp_find_unused_parameters": False},
    {"fsdp": "full_shard"},
    {"deepspeed": "zero3.json"},
    {"model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "sdpa"}},
    {"model_init_kwargs": {"device_map": "auto", "low_cpu_mem_usage": True}},
    {"trust_remote_code": True},
    {"chat_template_kwargs": {"enable_thinking": False}},
)
"""Arguments of GRPOConfig."""


def lengths(completions: list[str], **columns: Any) -> list[float]:
    """A reward of the length."""
    return [float(len(text)) for text in completions]


def _peft(**changes: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **changes})


CALLS: tuple[tuple[str, Callable[[Path], dict[str, Any]]], ...] = (
    ("model=path", lambda folder: {"model": str(folder)}),
    ("model=module, processing_class", lambda folder: {"model": AutoModelForCausalLM.from_pretrained(folder)}),
    (
        "model=torch.compile(module)",
        lambda folder: {"model": torch.compile(AutoModelForCausalLM.from_pretrained(folder))},
    ),
    ("peft_config", lambda folder: {"peft_config": _peft()}),
    ("peft_config, all-linear", lambda folder: {"peft_config": _peft(target_modules="all-linear")}),
    ("peft_config, target_modules=None", lambda folder: {"peft_config": _peft(target_modules=None)}),
    ("peft_config, use_rslora", lambda folder: {"peft_config": _peft(use_rslora=True)}),
    ("peft_config, use_dora", lambda folder: {"peft_config": _peft(use_dora=True)}),
    ("peft_config, modules_to_save", lambda folder: {"peft_config": _peft(modules_to_save=["lm_head"])}),
    ("reward_funcs=[f, f]", lambda folder: {"reward_funcs": [lengths, lengths]}),
    ("eval_dataset by name", lambda folder: {"eval_dataset": {"first": [{"prompt": "ab"}]}}),
    ("callbacks=[]", lambda folder: {"callbacks": []}),
)
"""Arguments of the trainer: a name, and a function that makes them of the folder of a model."""


def write_model(folder: Path) -> None:
    """A tiny Llama with a tokenizer of letters."""
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: at + 2 for at, letter in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>").save_pretrained(folder)
    shape = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)


def attempt(folder: Path, settings: dict[str, Any], arguments: dict[str, Any]) -> tuple[str, str]:
    """ "taken", "hint" or "refused", and the words of a hint or refusal."""
    with tempfile.TemporaryDirectory() as output, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        given = {"output_dir": output, "max_steps": 4, "max_completion_length": 64, **settings}
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                GRPOTrainer(
                    **{
                        "model": str(folder),
                        "reward_funcs": lengths,
                        "args": GRPOConfig(**given),
                        "train_dataset": [{"prompt": "ab"}] * 8,
                        "eval_dataset": [{"prompt": "ab"}],
                        **arguments,
                    }
                )
        except (CorrenteError, ImportError) as error:
            return "refused", " ".join(str(error).split())
        hints = [str(one.message) for one in warned if "accepted" in str(one.message)]
        return ("hint", hints[0]) if hints else ("taken", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", action="store_true", help="print hints as well")
    parser.add_argument("--json", type=Path, default=None)
    chosen = parser.parse_args()
    report: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "model"
        write_model(folder)
        cases = [
            (", ".join(f"{name}={value!r}" for name, value in settings.items()), settings, lambda _: {})
            for settings in SETTINGS
        ]
        cases += [(name, {}, make) for name, make in CALLS]
        for name, settings, make in cases:
            outcome, words = attempt(folder, settings, make(folder))
            report.append({"case": name, "outcome": outcome, "words": words})
            if outcome == "refused" or (chosen.verbose and outcome == "hint"):
                print(f"{outcome:8} {name}\n         {words[:200]}")
    counts = {outcome: sum(line["outcome"] == outcome for line in report) for outcome in ("taken", "hint", "refused")}
    print(f"{len(report)} cases: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
