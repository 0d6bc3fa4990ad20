"""What teachers add to the loss: numbers by hand, finite differences, whole distributions, and through the real learner."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from corrente import config as c
from corrente.algo import divergence
from corrente.algo.base import TeacherBatch, Trained
from corrente.algo.losses import PolicyObjective
from corrente.config import Algo, DapoObjective, Distill, RunConfig, Staleness
from corrente.data.types import Batch, TeacherLogprobs
from corrente.learner.core import TorchLearner
from corrente.learner.packing import plan_packs

LOSSES = ("advantage", "k1", "k2", "k3", "jsd")


def _f(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _objective(
    loss: str, clip: dict[str, Any] | None = None, *, correct: str = "none", proximal: str = "auto", **keys: Any
) -> PolicyObjective:
    return PolicyObjective(
        RunConfig(
            algo=Algo(objective=DapoObjective(**{"delta": None, **(clip or {})}), proximal=proximal),  # pyright: ignore
            distill=Distill(loss=loss, **keys),  # pyright: ignore[reportArgumentType]
            staleness=Staleness(correct=correct),  # pyright: ignore[reportArgumentType]
        )
    )


def _guide(teacher: torch.Tensor, *, weight: torch.Tensor | None = None) -> TeacherBatch:
    weight = torch.ones_like(teacher) if weight is None else weight
    return TeacherBatch(weight_K=weight, logprobs_K=teacher, top_KJ=teacher.new_empty((len(teacher), 0)))


def _total(
    objective: PolicyObjective, logprobs: torch.Tensor, behaviour: torch.Tensor, *guides: TeacherBatch, **more: Any
):
    filled = {"advantages_K": torch.zeros_like(behaviour), "weights_K": torch.ones_like(behaviour), **more}
    return objective(Trained(logprobs_K=logprobs, behaviour_K=behaviour, teachers=guides, **filled)).total


# ---- reverse KL, of the tokens that were sampled ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "value", "gradient"),
    [
        # log pi = -1, log mu = -1.1, log q = -1.5: l = 0.5, r = e^0.1
        ("advantage", math.exp(0.1) * 0.5, math.exp(0.1) * 0.5),
        ("k1", math.exp(0.1) * 0.5, math.exp(0.1) * (0.5 + 1)),
        ("k2", 0.125, 0.5),
        ("k3", math.exp(0.1) * (math.exp(-0.5) - 0.5), math.exp(0.1) * 0.5),
    ],
)
def test_reverse_kl_by_hand(loss: str, value: float, gradient: float):
    logprobs = _f(-1.0).requires_grad_()
    total = _total(_objective(loss), logprobs, _f(-1.1), _guide(_f(-1.5)))
    assert total.item() == pytest.approx(value)
    assert torch.autograd.grad(total, logprobs)[0].item() == pytest.approx(gradient)


def test_advantage_is_clipped_like_any_other():
    """The teacher likes the token better, but the policy has moved up already: the clip holds it."""
    logprobs = _f(-1.0).requires_grad_()
    total = _total(_objective("advantage", {"epsilon_high": 0.2}), logprobs, _f(-2.0), _guide(_f(-0.4)))
    assert total.item() == pytest.approx(-1.2 * 0.6)
    assert torch.autograd.grad(total, logprobs)[0].item() == 0


def test_rewards_are_mixed_in_by_their_weight():
    keys = {"weight": 0.5, "reward_weight": 2.0}
    total = _total(_objective("advantage", **keys), _f(-1.0), _f(-1.0), _guide(_f(-1.6)), advantages_K=_f(3.0))
    assert total.item() == pytest.approx(-(2 * 3.0 - 0.5 * 0.6))
    total = _total(_objective("k2", **keys), _f(-1.0), _f(-1.0), _guide(_f(-1.6)), advantages_K=_f(3.0))
    assert total.item() == pytest.approx(-2 * 3.0 + 0.5 * 0.18)
    total = _total(_objective("k2"), _f(-1.0), _f(-1.0), _guide(_f(-1.6)), advantages_K=_f(3.0))
    assert total.item() == pytest.approx(0.18)


def test_several_teachers_count_by_their_weights():
    first, second = _guide(_f(-1.5, -9.0), weight=_f(0.5, 0.0)), _guide(_f(-2.0, -1.2), weight=_f(2.0, 1.0))
    total = _total(_objective("k2"), _f(-1.0, -1.0), _f(-1.0, -1.0), first, second)
    assert total.item() == pytest.approx(0.5 * 0.125 + 2.0 * 0.5 + 0.02)


def test_staleness_is_corrected_as_for_the_policy():
    """Behind a truncated weight p is the present policy: r is 1, and w = min(pi / mu, 2)."""
    objective = _objective("k3", {"epsilon_high": 0.2}, correct="tis")
    logprobs = _f(-1.0, -1.0).requires_grad_()
    total = _total(objective, logprobs, _f(-1.1, -4.0), _guide(_f(-1.5, -1.5)))
    k3 = math.exp(-0.5) - 0.5
    assert total.item() == pytest.approx((math.exp(0.1) + 2) * k3)
    out = _total(_objective("k3", correct="mis"), _f(-1.0, -1.0), _f(-1.1, -4.0), _guide(_f(-1.5, -1.5)))
    assert out.item() == pytest.approx(math.exp(0.1) * k3)


# ---- the divergence over the teacher's likeliest ------------------------------------------------------------------------------


def test_divergence_by_hand():
    """Two likeliest tokens and the tail: q = (0.5, 0.3, 0.2), p = (0.4, 0.2, 0.4)."""
    q, p = (0.5, 0.3, 0.2), (0.4, 0.2, 0.4)
    m = [0.3 * a + 0.7 * b for a, b in zip(q, p, strict=True)]

    def kl(a: Any, b: Any) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    student, teacher = torch.tensor([p[:2]]).double().log(), torch.tensor([q[:2]]).double().log()
    for beta, want in ((0.0, kl(q, p)), (1.0, kl(p, q)), (0.3, 0.3 * kl(q, m) + 0.7 * kl(p, m))):
        assert divergence.jsd(student, teacher, beta=beta).item() == pytest.approx(want)


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 1.0])
def test_divergence_over_all_tokens_is_that_of_the_distributions(beta: float):
    torch.manual_seed(0)
    p, q = (torch.randn(6, 9, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    m = torch.logaddexp(q + math.log(beta or 1), p + math.log(1 - beta or 1))
    want = {
        0.0: (q.exp() * (q - p)).sum(-1),
        1.0: (p.exp() * (p - q)).sum(-1),
    }.get(beta, beta * (q.exp() * (q - m)).sum(-1) + (1 - beta) * (p.exp() * (p - m)).sum(-1))
    torch.testing.assert_close(divergence.jsd(p, q, beta=beta), want, atol=1e-9, rtol=1e-9)
    fewer = [divergence.jsd(p[:, :j], q[:, :j], beta=beta) for j in range(1, 10)]
    assert all((a <= b + 1e-9).all() for a, b in itertools.pairwise(fewer))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_tail_is_drawn_to_the_teachers(beta: float):
    """The student gives the likeliest tokens the right proportions but too little of the whole: only the tail tells."""
    student = torch.tensor([[0.3, 0.15]]).double().log().requires_grad_()
    teacher = torch.tensor([[0.6, 0.3]]).double().log()
    value = divergence.jsd(student, teacher, beta=beta)
    (gradient,) = torch.autograd.grad(value, student)
    assert value.item() > 0.1
    assert (gradient < 0).all()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_divergence_survives_certainty_and_impossibility(beta: float):
    student = torch.tensor([[0.0, -torch.inf], [-1e-9, -60.0], [-80.0, -0.1]], requires_grad=True)
    teacher = torch.tensor([[-torch.inf, 0.0], [0.0, -90.0], [-1e-12, -30.0]])
    value = divergence.jsd(student, teacher, beta=beta)
    (gradient,) = torch.autograd.grad(value.sum(), student)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


# ---- for all of them ----------------------------------------------------------------------------------------------------------


def _case(loss: str, *, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Log-probs, behaviour, and guides as a function of what the student gives to the likeliest."""
    rng = torch.Generator().manual_seed(seed)
    behaviour = -torch.rand(12, generator=rng, dtype=torch.float64) * 3 - 0.1
    at = behaviour + 0.3 * torch.randn(12, generator=rng, dtype=torch.float64)
    teacher = at + 0.4 * torch.randn(12, generator=rng, dtype=torch.float64)
    tops = [torch.randn(12, 8, generator=rng, dtype=torch.float64).log_softmax(-1)[:, :3] for _ in range(2)]
    weight = torch.rand(12, generator=rng, dtype=torch.float64)
    weight[::4] = 0

    def guides(student: torch.Tensor) -> tuple[TeacherBatch, ...]:
        return (TeacherBatch(weight_K=weight, logprobs_K=teacher, top_KJ=tops[0], student_KJ=student),)

    return torch.cat([at[:, None], tops[1]], 1), behaviour, guides


@pytest.mark.parametrize("loss", ["k1", "k2", "k3", "jsd"])
def test_gradient_equals_finite_differences(loss: str):
    at, behaviour, guides = _case(loss)
    objective = _objective(loss, proximal="behaviour", beta=0.3)

    def total(x: torch.Tensor) -> torch.Tensor:
        return _total(objective, x[:, 0], behaviour, *guides(x[:, 1:]))

    x = at.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(x), x)
    for k in range(at.numel()):
        step = torch.zeros(at.numel(), dtype=torch.float64)
        step[k] = 1e-6
        step = step.view_as(at)
        numeric = (total(at + step) - total(at - step)) / 2e-6
        assert gradient.flatten()[k].item() == pytest.approx(numeric.item(), abs=1e-6)


@pytest.mark.parametrize("correct", ["none", "tis"])
@pytest.mark.parametrize("loss", LOSSES)
def test_teacher_equal_to_the_student_gives_a_loss_of_zero(loss: str, correct: str):
    at, behaviour, _ = _case(loss)
    x = at.clone().requires_grad_()
    same = TeacherBatch(weight_K=torch.ones(12).double(), logprobs_K=at[:, 0], top_KJ=at[:, 1:], student_KJ=x[:, 1:])
    total = _total(_objective(loss, correct=correct), x[:, 0], behaviour, same)
    assert total.item() == 0
    (gradient,) = torch.autograd.grad(total, x)
    if loss == "k1":  # zero on average alone
        ratio = (at[:, 0] - behaviour).exp() if correct == "none" else (at[:, 0] - behaviour).exp().clamp(max=2)
        torch.testing.assert_close(gradient[:, 0], ratio)
    else:
        assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("loss", LOSSES)
def test_no_gradient_reaches_a_teacher_and_silence_cannot_matter(loss: str):
    at, behaviour, guides = _case(loss)
    (clean,) = guides(at[:, 1:])
    silent = clean.weight_K == 0
    leaves = [clean.logprobs_K.clone().requires_grad_(), clean.top_KJ.clone().requires_grad_()]
    x = at.clone().requires_grad_()

    def total(logprobs: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        guide = TeacherBatch(weight_K=clean.weight_K, logprobs_K=logprobs, top_KJ=top, student_KJ=x[:, 1:])
        return _total(_objective(loss), x[:, 0], behaviour, guide)

    of_teacher = torch.autograd.grad(total(*leaves), leaves, allow_unused=True)
    assert all(gradient is None for gradient in of_teacher)
    want, want_gradient = total(*leaves), torch.autograd.grad(total(*leaves), x)[0]
    for poison in (torch.nan, torch.inf, -torch.inf):
        logprobs, top = clean.logprobs_K.clone(), clean.top_KJ.clone()
        logprobs[silent], top[silent] = poison, poison
        got = total(logprobs, top)
        assert got.item() == want.item()
        torch.testing.assert_close(torch.autograd.grad(got, x)[0], want_gradient, rtol=0, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_token_that_a_correction_leaves_out_is_not_taught(loss: str):
    at, behaviour, guides = _case(loss)
    behaviour = behaviour.clone()
    behaviour[1] = at[1, 0] - 3  # a ratio of 20
    x = at.clone().requires_grad_()
    objective = _objective(loss, correct="mis")
    (gradient,) = torch.autograd.grad(_total(objective, x[:, 0], behaviour, *guides(x[:, 1:])), x)
    assert gradient[1].abs().max() == 0
    assert gradient[2].abs().max() > 0


# ---- through the learner ------------------------------------------------------------------------------------------------------


def _taught(batch: Batch, *, vocabulary: int, top: int, teacher: str = "wise", skip: int | None = None) -> Batch:
    """The batch with answers of a teacher for each row but ``skip``: a random distribution at each place."""
    rng = np.random.default_rng(5)
    rows = []
    for at, row in enumerate(batch.rows):
        logits = rng.normal(size=(len(row.tokens), vocabulary))
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        likeliest = np.argsort(-logprobs, -1)[:, :top].astype(np.int32)
        answer = TeacherLogprobs(
            teacher=teacher,
            logprobs=np.where(row.loss_mask, logprobs[np.arange(len(row.tokens)), row.tokens], 0).astype(np.float32),
            top_ids=np.where(row.loss_mask[:, None], likeliest, 0),
            top_logprobs=np.where(row.loss_mask[:, None], np.take_along_axis(logprobs, likeliest, -1), 0).astype(
                np.float32
            ),
        )
        rows.append(row if at == skip else msgspec.structs.replace(row, teachers=(*row.teachers, answer)))
    return msgspec.structs.replace(batch, rows=tuple(rows))


def _core(path: Path, loss: str, **learner: Any) -> TorchLearner:
    config = RunConfig(
        model=c.Model(path=str(path)),
        learner=c.LearnerConfig(lr=1e-2, **learner),
        distill=Distill(loss=loss, reward_weight=0.5),  # pyright: ignore[reportArgumentType]
        staleness=Staleness(correct="tis"),
    )
    return TorchLearner(config)


def _gradient(core: TorchLearner, batch: Batch, *, budget: int) -> tuple[dict[str, torch.Tensor], float]:
    weights_R = core.objective.row_weights(batch)
    packs = plan_packs(batch.rows, weights_R=weights_R, version=batch.version, budget=budget, teachers=True)
    total = core.gradient.accumulate(packs, core.gradient.survey(packs), fresh=True).reduced_values()["train/loss"]
    grads = {name: p.grad.clone() for name, p in core.model.named_parameters() if p.grad is not None}
    core.backend.discard()
    return grads, total


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_gradient_is_the_same_for_every_split(loss: str, name: str, model_dir, build_batch):
    """Two teachers, each silent about some row; gemma2's logits are capped, so the model makes them itself."""
    batch = _taught(build_batch(), vocabulary=61, top=4, skip=1)
    batch = _taught(batch, vocabulary=61, top=2, teacher="stern", skip=0)
    core = _core(model_dir(name), loss)
    (want, total), (got, cut) = (_gradient(core, batch, budget=budget) for budget in (1 << 20, 1))
    assert cut == pytest.approx(total, rel=1e-4)
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-3, atol=1e-5)


def test_step_draws_the_policy_to_its_teacher(model_dir, build_batch):
    batch = _taught(build_batch(), vocabulary=61, top=8)
    core = _core(model_dir("llama"), "jsd")
    reports = [core.step(batch) for _ in range(12)]
    assert reports[0]["distill/tokens"] == reports[0]["train/tokens"]
    assert reports[-1]["train/loss"] < reports[0]["train/loss"]
    assert reports[-1]["distill/reverse_kl_k3"] < reports[0]["distill/reverse_kl_k3"]


def test_rows_that_no_teacher_spoke_of_report_nothing(model_dir, build_batch):
    assert _core(model_dir("llama"), "k3").step(build_batch())["distill/tokens"] == 0
