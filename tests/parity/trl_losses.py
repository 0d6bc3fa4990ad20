"""Runs in an environment that has trl: reads cases (JSON) from standard input, writes TRL's loss and gradient of each.

A case is the arrays of one batch, (B, T) each, and the settings of a GRPOConfig. The loss is GRPOTrainer._compute_loss itself,
on a trainer that was not set up: model and accelerator are replaced by what one process with given log-probs would have.
"""

import contextlib
import json
import sys
from collections import defaultdict
from types import SimpleNamespace

with contextlib.redirect_stdout(sys.stderr):
    import torch
    from trl import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer


class OneProcess:
    """What _compute_loss asks of an accelerator."""

    num_processes = 1
    sync_gradients = True

    def gather(self, tensor):
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor, reduction="sum"):
        return tensor

    def pad_across_processes(self, tensor, dim=0, pad_index=0):
        return tensor


def loss(case):
    settings = {name: value for name, value in case["settings"].items() if name != "max_completion_length"}
    args = GRPOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False, **settings)
    arrays = {name: torch.tensor(value, dtype=torch.float64) for name, value in case["arrays"].items()}
    mask = arrays.pop("mask")
    logprobs = arrays.pop("logprobs").requires_grad_()
    entropies = arrays.pop("entropies").requires_grad_()
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    for name in ("beta", "loss_type", "importance_sampling_level", "off_policy_mask_threshold", "top_entropy_quantile"):
        setattr(trainer, name, getattr(args, name))
    trainer.args = args
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = "importance_sampling_ratio" in arrays
    trainer.max_completion_length = case["settings"]["max_completion_length"]
    trainer.current_gradient_accumulation_steps = 1
    args.steps_per_generation = 1
    trainer.entropy_coef = args.entropy_coef
    trainer.use_adaptive_entropy = False
    trainer._entropy_bonus_enabled = args.entropy_coef > 0
    trainer.aux_loss_enabled = False
    trainer.accelerator = OneProcess()
    trainer.model = SimpleNamespace(training=True)
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (logprobs, entropies, None)
    ids = torch.zeros_like(mask, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "num_items_in_batch": mask.sum(),
        **arrays,
    }
    value = trainer._compute_loss(None, inputs)
    gradients = torch.autograd.grad(value, [logprobs, entropies], allow_unused=True)
    zeros = torch.zeros_like(mask)
    return {
        "loss": value.item(),
        "gradient": gradients[0].tolist(),
        "entropy_gradient": (zeros if gradients[1] is None else gradients[1]).tolist(),
    }


def advantages(case):
    """TRL computes these inside a method that generates as well, so its formulas are written out here, on its nanstd."""
    from trl.trainer.utils import nanstd

    rewards_per_func = torch.tensor(case["scores"], dtype=torch.float64)
    weights, size = torch.tensor(case["weights"], dtype=torch.float64), case["group_size"]
    if case["aggregation"] == "normalize_then_sum":
        grouped = rewards_per_func.view(-1, size, len(weights))
        scaled = (grouped - torch.nanmean(grouped, dim=1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
        rewards = (scaled.view(-1, len(weights)) * weights).nansum(dim=1)
        return ((rewards - torch.nanmean(rewards)) / (nanstd(rewards) + 1e-4)).tolist()
    rewards = (rewards_per_func * weights).nansum(dim=1)
    centred = rewards - rewards.view(-1, size).mean(1).repeat_interleave(size)
    std = {
        "group": nanstd(rewards.view(-1, size), dim=1).repeat_interleave(size),
        "batch": nanstd(rewards).expand_as(rewards),
    }.get(case["scale_rewards"])
    return (centred if std is None else centred / (std + 1e-4)).tolist()


def divergence(case):
    """Per token (T,), and its gradient with respect to the student's logits (T, V)."""
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    student, teacher = (torch.tensor(case[name], dtype=torch.float64)[None] for name in ("student", "teacher"))
    student.requires_grad_()
    value = GKDTrainer.generalized_jsd_loss(
        student, teacher, beta=case["beta"], temperature=case["temperature"], reduction="none"
    ).sum(-1)
    return {"value": value[0].tolist(), "gradient": torch.autograd.grad(value.sum(), student)[0][0].tolist()}


KINDS = {"loss": loss, "advantages": advantages, "divergence": divergence}

with contextlib.redirect_stdout(sys.stderr):
    answers = [KINDS[case["kind"]](case) for case in json.load(sys.stdin)]
json.dump(answers, sys.stdout)
