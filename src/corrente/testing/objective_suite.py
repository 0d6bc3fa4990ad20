"""The contract of a policy objective (algo/policy.py), held on the objective alone and inside the whole loss. Needs torch.

Inside the loss it meets every correction there is and log-probs as far apart as float32 holds, as engines record them for tokens
that cannot be: what a correction leaves out must not come back as 0 * inf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from corrente.algo.base import Trained
from corrente.algo.losses import PolicyObjective
from corrente.algo.policy import PolicyInputs, as_term
from corrente.algo.rows import TrainingRows
from corrente.config import Algo, RunConfig, Staleness, UserObjective
from corrente.testing.expect import expect

LENGTHS = (3, 1, 5, 2, 4)
ROW = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"veto": 0.5},
    *({"band": band, "band_low": 0.5} for band in ("geometric", "product")),
    *({"band": band} for band in ("k2", "k3")),
    {"off_policy_mask_threshold": 0.5},
    *(
        {"correct": correct, "correct_level": level, "correct_floor": 0.5 if correct == "icepop" else 0.0}
        for correct in ("tis", "mis", "icepop")
        for level in ("token", "sequence", "geometric")
    ),
    {"veto": 0.5, "correct": "tis", "normalise": True, "decay": 0.5},
)
"""Settings of ``staleness``: each rule alone, and several together."""
LARGEST = 3e38
GAPS = (0.0, 1.0, -1.0, 50.0, -50.0, 1e4, -1e4, LARGEST, -LARGEST)
"""Log-probs of the current policy less the recorded ones, in nats; the last overflow float32 when they are squared."""
ADVANTAGES = (0.0, 1.0, -1.0, 1e6, -1e6)


def check(function: Callable[..., Any], **keys: Any) -> None:
    """Raise ContractError for the first clause that ``function``, with these keys, does not keep."""

    def call(inputs: PolicyInputs) -> Any:
        return as_term(function(inputs, **keys), tokens=len(inputs.logprobs_K))

    _check_pure(call)
    _check_rows(call)
    _check_extremes(call)
    for correction in CORRECTIONS:
        _check_in_loss(call, correction)
        _check_left_out(call, correction)


def _inputs(logprobs_K: Tensor, proximal_K: Tensor, advantages_K: Tensor, row_K: Tensor) -> PolicyInputs:
    return PolicyInputs(
        logprobs_K=logprobs_K,
        proximal_K=proximal_K,
        advantages_K=advantages_K,
        rows=TrainingRows(row_K, like=logprobs_K),
    )


def _sample(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the current and the proximal policy, and advantages, of rows of several lengths (K,)."""
    rng = torch.Generator().manual_seed(seed)
    proximal_K = -0.05 - 2 * torch.rand(len(ROW), generator=rng, dtype=torch.float64)
    logprobs_K = (proximal_K + 0.1 * torch.randn(len(ROW), generator=rng, dtype=torch.float64)).clamp(max=-0.01)
    advantages_R = torch.randn(len(LENGTHS), generator=rng, dtype=torch.float64)
    return logprobs_K, proximal_K, advantages_R[ROW]


def _value(call: Callable[[PolicyInputs], Any], *given: Tensor) -> tuple[Tensor, Tensor]:
    """J per token, and the gradient of its sum, of log-probs, proximal log-probs, advantages and rows."""
    logprobs_K = given[0].detach().clone().requires_grad_()
    value_K = call(_inputs(logprobs_K, *given[1:])).value_K
    expect(value_K.requires_grad, "J is differentiable in the log-probs of the current policy")
    (gradient_K,) = torch.autograd.grad(value_K.sum(), logprobs_K)
    return value_K.detach(), gradient_K


def _check_pure(call: Callable[[PolicyInputs], Any]) -> None:
    given = _sample()
    before = [tensor.clone() for tensor in given]
    first, second = (call(_inputs(*given, ROW)).value_K for _ in range(2))
    expect(torch.equal(first, second), "the same inputs give the same J")
    expect(all(map(torch.equal, before, given)), "the inputs are not changed")
    expect(not first.requires_grad, "J is differentiable in the log-probs of the current policy alone")
    _, gradient_K = _value(call, *given, ROW)
    expect(bool(gradient_K.any()), "J has a gradient where advantages are not 0")


def _check_rows(call: Callable[[PolicyInputs], Any]) -> None:
    given = _sample(1)
    value_K, gradient_K = _value(call, *given, ROW)
    for row in range(len(LENGTHS)):
        mine = row == ROW
        alone = _value(call, *(tensor[mine] for tensor in given), ROW[mine])
        same = torch.allclose(alone[0], value_K[mine]) and torch.allclose(alone[1], gradient_K[mine])
        expect(same, "a row has the same J and gradient whatever rows are beside it", alone)
    order = torch.arange(len(ROW)).flip(0)
    turned = _value(call, *(tensor[order] for tensor in given), ROW[order])
    same = torch.allclose(turned[0], value_K[order]) and torch.allclose(turned[1], gradient_K[order])
    expect(same, "the order of rows, and of the tokens of a row, does not matter", turned)


def _check_extremes(call: Callable[[PolicyInputs], Any]) -> None:
    """The objective alone, on log-probs as the loss bounds them."""
    for gap in GAPS:
        for advantage in ADVANTAGES:
            logprobs_K, proximal_K = torch.full((len(ROW),), -1.0), torch.full((len(ROW),), -1.0)
            (logprobs_K if gap < 0 else proximal_K)[::2] = max(-1.0 - abs(gap), -1e4)
            value_K, gradient_K = _value(call, logprobs_K, proximal_K, torch.full_like(logprobs_K, advantage), ROW)
            finite = bool(value_K.isfinite().all() and gradient_K.isfinite().all())
            expect(finite, "J and its gradient are finite however far the policies are apart", (gap, advantage))


def _objective(call: Callable[[PolicyInputs], Any], correction: dict[str, Any]) -> PolicyObjective:
    config = RunConfig(algo=Algo(objective=UserObjective(function="")), staleness=Staleness(**correction))
    return PolicyObjective(config, policy=call)


def _loss(objective: PolicyObjective, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of these tokens as one step, its gradient, and the tokens that were left out."""
    logprobs_K = given["logprobs_K"].detach().clone().requires_grad_()
    part = Trained(**{**given, "logprobs_K": logprobs_K})
    constants = None
    if objective.needs_survey:
        with torch.no_grad():
            (constants,) = objective.survey([part])
    loss = objective(part, constants=constants)
    (gradient_K,) = torch.autograd.grad(loss.total, logprobs_K)
    return loss.total.detach(), gradient_K, loss.rejected_K


def _tokens(gap: float, advantage: float) -> dict[str, Tensor]:
    """Rows in float32 of which the first and the third hold a token whose log-probs are ``gap`` apart."""
    logprobs_K, behaviour_K = torch.full((len(ROW),), -1.0), torch.full((len(ROW),), -1.0)
    for at in (1, 5):
        (logprobs_K if gap < 0 else behaviour_K)[at] = -1.0 - abs(gap)
    return {
        "logprobs_K": logprobs_K,
        "behaviour_K": behaviour_K,
        "advantages_K": torch.full_like(logprobs_K, advantage),
        "weights_K": torch.full_like(logprobs_K, 1 / len(ROW)),
        "row_K": ROW,
        "lags_K": torch.arange(len(ROW)) % 3,
    }


def _check_in_loss(call: Callable[[PolicyInputs], Any], correction: dict[str, Any]) -> None:
    for gap in GAPS:
        for advantage in (1.0, -1.0, 1e6):
            total, gradient_K, _ = _loss(_objective(call, correction), _tokens(gap, advantage))
            finite = bool(total.isfinite() and gradient_K.isfinite().all())
            expect(finite, "loss and gradient are finite with every correction", (correction, gap, advantage))


def _check_left_out(call: Callable[[PolicyInputs], Any], correction: dict[str, Any]) -> None:
    """Rows that are left out whole: nothing in them reaches the loss."""
    if not (correction.get("veto") or correction.get("band") or correction.get("off_policy_mask_threshold")):
        return
    objective = _objective(call, correction)
    near, far = (_tokens(gap, -1.0) for gap in (-20.0, -LARGEST))
    total, gradient_K, rejected_K = _loss(objective, far)
    expect(bool(rejected_K.any()) and not gradient_K[rejected_K].any(), "a token that is left out has no gradient")
    other, other_gradient_K, _ = _loss(objective, near)
    same = torch.allclose(total, other) and torch.allclose(gradient_K, other_gradient_K)
    expect(same, "what is in a row that is left out changes nothing in the others", (correction, total, other))
    alone = {name: tensor[rejected_K] for name, tensor in far.items()}
    total, gradient_K, _ = _loss(objective, alone)
    expect(not total and not gradient_K.any(), "where everything is left out, loss and gradient are 0", total)
