"""Every policy objective against plain Python on one row at a time, finite differences in float64, and numbers made by hand.

The plain versions take the log-probs twice: as what moves, and as what was frozen where the formula says constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any, get_args, get_type_hints

import pytest
import torch

from corrente.algo.base import Trained
from corrente.algo.losses import PolicyObjective
from corrente.algo.objectives import OBJECTIVES
from corrente.algo.policy import PolicyInputs
from corrente.algo.rows import TrainingRows
from corrente.algo.traits import TRAITS
from corrente.config import Algo, RunConfig, Staleness

SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"epsilon": 0.05, "epsilon_high": 0.06},
    "gspo_token": {"epsilon": 0.05, "epsilon_high": 0.06},
    "luspo": {"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.06},
    "cispo": {"epsilon_high": 1.5},
    "dppo_kl": {"mask_low": 0.05, "mask_high": 0.05},
}
LENGTHS = (3, 1, 5, 2, 4)

Row = Sequence[float]


def _clip(r: float, a: float, algo: Algo) -> float:
    value = min(r * a, min(max(r, 1 - algo.epsilon), 1 + (algo.epsilon_high or algo.epsilon)) * a)
    return max(value, algo.delta * a) if a < 0 and algo.delta else value


def _ratios(x: Row, p: Row) -> list[float]:
    return [math.exp(a - b) for a, b in zip(x, p, strict=True)]


def _plain_clip(x: Row, at: Row, p: Row, a: Row, algo: Algo) -> list[float]:
    return [_clip(r, b, algo) for r, b in zip(_ratios(x, p), a, strict=True)]


def _plain_gspo(x: Row, at: Row, p: Row, a: Row, algo: Algo) -> list[float]:
    s = math.prod(_ratios(x, p)) ** (1 / len(x))
    return [_clip(s, b, algo) for b in a]


def _plain_gspo_token(x: Row, at: Row, p: Row, a: Row, algo: Algo) -> list[float]:
    s = math.prod(_ratios(at, p)) ** (1 / len(x))
    return [_clip(s * r, b, algo) for r, b in zip(_ratios(x, at), a, strict=True)]


def _plain_gmpo(x: Row, at: Row, p: Row, a: Row, algo: Algo) -> list[float]:
    least, most = 1 - algo.epsilon, 1 + (algo.epsilon_high or algo.epsilon)
    held = [min(r, most) if b >= 0 else max(r, least) for r, b in zip(_ratios(x, p), a, strict=True)]
    return [b * math.prod(held) ** (1 / len(x)) for b in a]


def _plain_cispo(x: Row, at: Row, p: Row, a: Row, algo: Algo) -> list[float]:
    cap = algo.epsilon_high or algo.epsilon
    return [min(r, cap) * b * y for r, b, y in zip(_ratios(at, p), a, x, strict=True)]


def _plain_sapo(x: Row, at: Row, p: Row, a: Row, algo: Algo) -> list[float]:
    out = []
    for r, b in zip(_ratios(x, p), a, strict=True):
        tau = algo.sapo_temperature_pos if b > 0 else algo.sapo_temperature_neg
        out.append(4 / tau / (1 + math.exp(-tau * (r - 1))) * b)
    return out


def _plain_vespo(x: Row, at: Row, p: Row, a: Row, algo: Algo) -> list[float]:
    w, out = math.prod(_ratios(at, p)), []
    for b, y in zip(a, x, strict=True):
        k, lam = (algo.vespo_k_pos, algo.vespo_lambda_pos) if b >= 0 else (algo.vespo_k_neg, algo.vespo_lambda_neg)
        out.append(math.exp(lam) * w**k * math.exp(-lam * w) * b * y)
    return out


def _plain_topr(x: Row, at: Row, p: Row, a: Row, algo: Algo) -> list[float]:
    w = min(math.prod(_ratios(at, p)), 1.0)
    return [(w if b < 0 else 1.0) * b * y for b, y in zip(a, x, strict=True)]


def _plain_kimi_k15(x: Row, at: Row, p: Row, a: Row, algo: Algo) -> list[float]:
    whole = sum(x) - sum(p)
    return [b * (y - q) - algo.tau / 2 * whole**2 / len(x) for b, y, q in zip(a, x, p, strict=True)]


def _plain_kimi_k2(x: Row, at: Row, p: Row, a: Row, algo: Algo) -> list[float]:
    return [-((b - algo.tau * (sum(x) - sum(p))) ** 2) / len(x) for b in a]


def _plain_dppo_tv(x: Row, at: Row, p: Row, a: Row, algo: Algo) -> list[float]:
    out = []
    for r, b, y, q in zip(_ratios(x, p), a, at, p, strict=True):
        rise = math.exp(y) - math.exp(q)
        gone = (b > 0 and rise > algo.mask_high) or (b < 0 and -rise > algo.mask_low)
        out.append(0.0 if gone else r * b)
    return out


def _plain_dppo_kl(x: Row, at: Row, p: Row, a: Row, algo: Algo) -> list[float]:
    out = []
    for r, b, y, q in zip(_ratios(x, p), a, at, p, strict=True):
        pi, old = math.exp(y), math.exp(q)
        apart = old * math.log(old / pi) + (1 - old) * math.log((1 - old) / (1 - pi))
        gone = (b > 0 and y > q and apart > algo.mask_high) or (b < 0 and y < q and apart > algo.mask_low)
        out.append(0.0 if gone else r * b)
    return out


def _plain_ipo(x: Row, at: Row, p: Row, a: Row, algo: Algo) -> list[float]:
    rises = [math.exp(y) - math.exp(q) for y, q in zip(at, p, strict=True)]
    free = [-algo.mask_low <= rise <= algo.mask_high for rise in rises]
    return [r * b if fine else 0.0 for r, b, fine in zip(_ratios(x, p), a, free, strict=True)]


def _plain_dro(x: Row, at: Row, p: Row, a: Row, algo: Algo) -> list[float]:
    return [b * y - algo.tau / 2 * (y - q) ** 2 for b, y, q in zip(a, x, p, strict=True)]


def _plain_reinforce(x: Row, at: Row, p: Row, a: Row, algo: Algo) -> list[float]:
    return [b * y for b, y in zip(a, x, strict=True)]


PLAIN: dict[str, Callable[..., list[float]]] = {
    **dict.fromkeys(("dapo", "grpo", "bnpo", "dr_grpo"), _plain_clip),
    "luspo": _plain_gspo,
    "gspo": _plain_gspo,
    "gspo_token": _plain_gspo_token,
    "gmpo": _plain_gmpo,
    "cispo": _plain_cispo,
    "sapo": _plain_sapo,
    "vespo": _plain_vespo,
    "topr": _plain_topr,
    "kimi_k15": _plain_kimi_k15,
    "kimi_k2": _plain_kimi_k2,
    "dppo_tv": _plain_dppo_tv,
    "dppo_kl": _plain_dppo_kl,
    "ipo": _plain_ipo,
    "dro": _plain_dro,
    "reinforce": _plain_reinforce,
}


def _algo(name: str, **more: Any) -> Algo:
    return Algo(loss=name, **(SETTINGS.get(name, {}) | more))  # pyright: ignore


def _random(seed: int = 0, *, spread: float = 0.5) -> dict[str, Any]:
    """Rows of several lengths; the advantage is the row's own, as it is for an outcome reward."""
    rng = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    proximal = -0.05 - 2 * torch.rand(count, generator=rng, dtype=torch.float64)
    moved = spread * torch.randn(count, generator=rng, dtype=torch.float64)
    return {
        "row": torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        "proximal": proximal,
        "logprobs": (proximal + moved).clamp(max=-0.01),
        "advantages": torch.randn(len(LENGTHS), generator=rng, dtype=torch.float64).repeat_interleave(
            torch.tensor(LENGTHS)
        ),
    }


def _values(name: str, data: dict[str, Any], logprobs: torch.Tensor, algo: Algo):
    seen = PolicyInputs(
        logprobs_K=logprobs,
        proximal_K=data["proximal"],
        advantages_K=data["advantages"],
        rows=TrainingRows(data["row"], like=logprobs),
    )
    return OBJECTIVES[name](seen, algo)


def _plain(name: str, data: dict[str, Any], x: torch.Tensor, algo: Algo) -> list[float]:
    out: list[float] = []
    for row in range(len(LENGTHS)):
        mine = data["row"] == row
        columns = (x, data["logprobs"], data["proximal"], data["advantages"])
        out += PLAIN[name](*(column[mine].tolist() for column in columns), algo)
    return out


def test_every_objective_is_listed_everywhere():
    allowed = get_args(get_type_hints(Algo)["loss"])
    assert set(OBJECTIVES) == set(TRAITS) == set(PLAIN) == set(allowed)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_values_and_gradients_equal_plain_python_and_finite_differences(name: str, seed: int):
    data, algo = _random(seed), _algo(name)
    logprobs = data["logprobs"].clone().requires_grad_()
    value = _values(name, data, logprobs, algo)
    want = _plain(name, data, data["logprobs"], algo)
    torch.testing.assert_close(value.value_K.detach(), torch.tensor(want, dtype=torch.float64), atol=1e-12, rtol=1e-9)
    weights = torch.linspace(0.5, 1.5, len(want), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((weights * value.value_K).sum(), logprobs)
    step = 1e-6
    for k in range(len(want)):
        ends = []
        for sign in (1, -1):
            x = data["logprobs"].clone()
            x[k] += sign * step
            ends.append(sum(w * v for w, v in zip(weights.tolist(), _plain(name, data, x, algo), strict=True)))
        assert gradient[k].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=2e-7), k


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_at_equal_weights_is_reinforce(name: str):
    """Every ratio is exactly 1, nothing is cut, and the sum over a row of the gradient is the row's advantage times its length
    (for kimi_k2, which squares: 2 tau times the advantage times the length)."""
    data = _random()
    data["logprobs"] = data["proximal"]
    logprobs = data["logprobs"].clone().requires_grad_()
    algo = _algo(name)
    seen = PolicyInputs(
        logprobs_K=logprobs,
        proximal_K=data["proximal"],
        advantages_K=data["advantages"],
        rows=TrainingRows(data["row"], like=logprobs),
    )
    assert torch.equal(seen.log_ratio_K.exp(), torch.ones_like(logprobs))
    value = OBJECTIVES[name](seen, algo)
    assert not value.cut_K.any()
    (gradient,) = torch.autograd.grad(value.value_K.sum(), logprobs)
    factor = 2 * algo.tau if name == "kimi_k2" else 1
    torch.testing.assert_close(gradient, factor * data["advantages"], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows_may_come_in_any_split(name: str):
    """A row's tokens have the same value and gradient whatever other rows are in the micro-batch."""
    data, algo = _random(3), _algo(name)
    logprobs = data["logprobs"].clone().requires_grad_()
    together = _values(name, data, logprobs, algo).value_K
    (whole,) = torch.autograd.grad(together.sum(), logprobs)
    for row in range(len(LENGTHS)):
        mine = data["row"] == row
        part = {key: value[mine] for key, value in data.items()}
        alone = part["logprobs"].clone().requires_grad_()
        value = _values(name, part, alone, algo).value_K
        torch.testing.assert_close(value, together[mine])
        torch.testing.assert_close(torch.autograd.grad(value.sum(), alone)[0], whole[mine])


@pytest.mark.parametrize("correct", ["none", "tis", "icepop"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_gradient_through_what_is_given(name: str, correct: str):
    data = _random()
    algo = _algo(name, beta=0.5)
    floor = {"correct_floor": 0.5} if correct == "icepop" else {}
    objective = PolicyObjective(RunConfig(algo=algo, staleness=Staleness(correct=correct, **floor)))  # pyright: ignore
    given = {
        key: data[source].clone().requires_grad_()
        for key, source in (("behaviour_K", "proximal"), ("advantages_K", "advantages"))
    }
    reference = (data["proximal"] - 0.1).requires_grad_()
    logprobs = data["logprobs"].clone().requires_grad_()
    loss = objective(
        Trained(
            logprobs_K=logprobs,
            behaviour_K=given["behaviour_K"],
            advantages_K=given["advantages_K"].detach(),
            weights_K=torch.ones_like(logprobs),
            row_K=data["row"],
            reference_K=reference,
        )
    )
    loss.total.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.abs().sum() > 0
    assert given["behaviour_K"].grad is None
    assert reference.grad is None


@pytest.mark.parametrize("name", OBJECTIVES)
def test_far_off_tokens_stay_finite(name: str):
    data = _random()
    data["logprobs"] = data["logprobs"].clone()
    data["logprobs"][0], data["logprobs"][5], data["proximal"][7] = -900.0, -1e-9, -900.0
    logprobs = data["logprobs"].clone().requires_grad_()
    value = _values(name, data, logprobs, _algo(name)).value_K
    assert torch.isfinite(value).all()
    assert torch.isfinite(torch.autograd.grad(value.sum(), logprobs)[0]).all()


# ---- by hand ------------------------------------------------------------------------------------------------------------------


def _hand(name: str, ratios: Sequence[float], advantage: float, *, start: float = 0.2, **settings: Any):
    """J and its gradient on one row whose tokens had probability ``start`` and have ``start`` times a ratio."""
    proximal = torch.full((len(ratios),), math.log(start), dtype=torch.float64)
    logprobs = (proximal + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    seen = PolicyInputs(
        logprobs_K=logprobs,
        proximal_K=proximal,
        advantages_K=torch.full_like(proximal, advantage),
        rows=TrainingRows(None, like=proximal),
    )
    value = OBJECTIVES[name](seen, _algo(name, **settings))
    (gradient,) = torch.autograd.grad(value.value_K.sum(), logprobs)
    return value, gradient.tolist()


def test_gspo_clips_the_geometric_mean():
    """Ratios 4 and 1: mean 2, above 1.06; 1/4 and 4: mean 1, free, though both tokens are far off."""
    value, gradient = _hand("gspo", [4.0, 1.0], 1.0)
    assert value.value_K.tolist() == pytest.approx([1.06, 1.06])
    assert gradient == [0, 0]
    assert value.high_K.all()
    value, gradient = _hand("gspo", [0.25, 4.0], 1.0)
    assert value.value_K.tolist() == pytest.approx([1, 1])
    assert gradient == pytest.approx([1, 1])


def test_gspo_token_has_the_gradient_of_gspo():
    for ratios, advantage in (([1.02, 0.99, 1.05], 1.5), ([0.9, 1.0, 1.2], -0.5)):
        assert _hand("gspo_token", ratios, advantage)[1] == pytest.approx(_hand("gspo", ratios, advantage)[1])


def test_gmpo_clips_tokens_and_averages_ratios():
    """Ratios 4 and 1, A = 1: 4 is held at 1.28, root of 1.28 * 1; the free token has half of it as gradient, twice over."""
    value, gradient = _hand("gmpo", [4.0, 1.0], 1.0)
    assert value.value_K.tolist() == pytest.approx([math.sqrt(1.28)] * 2)
    assert gradient == pytest.approx([0, math.sqrt(1.28)])
    assert value.cut_K.tolist() == [True, False]


def test_cispo_keeps_every_gradient():
    value, gradient = _hand("cispo", [0.5, 3.0], 2.0)
    assert gradient == pytest.approx([1.0, 3.0])  # 0.5 * 2, and 1.5 * 2 for the weight is capped
    assert value.cut_K.tolist() == [False, True]


def test_sapo_fades_with_distance():
    """A = 1, tau = 1, r = 2: s = sigmoid(1) = 0.7311, gradient 4 * s (1 - s) * r = 4 * 0.1966 * 2."""
    assert _hand("sapo", [2.0], 1.0)[1] == pytest.approx([1.572895], abs=1e-5)


def test_vespo_weighs_by_the_product():
    """Ratios 2 and 1/2: product 1, weight 1. Ratios 2 and 1: w = 2, e^3 * 4 * e^-6 = 0.19915."""
    assert _hand("vespo", [2.0, 0.5], 1.0)[1] == pytest.approx([1, 1])
    assert _hand("vespo", [2.0, 1.0], 1.0)[1] == pytest.approx([0.199148, 0.199148], abs=1e-5)


def test_topr_tapers_bad_samples_alone():
    assert _hand("topr", [0.5, 0.5], 2.0)[1] == pytest.approx([2, 2])
    assert _hand("topr", [0.5, 0.5], -2.0)[1] == pytest.approx([-0.5, -0.5])  # product 1/4
    assert _hand("topr", [3.0, 2.0], -2.0)[1] == pytest.approx([-2, -2])


def test_kimi_gradients_differ_by_a_factor():
    """L = log 6. k15: A - tau L. k2: 2 tau of it."""
    want = 1.0 - 0.1 * math.log(6)
    assert _hand("kimi_k15", [2.0, 3.0], 1.0)[1] == pytest.approx([want, want])
    assert _hand("kimi_k2", [2.0, 3.0], 1.0)[1] == pytest.approx([0.2 * want, 0.2 * want])


def test_kimi_is_stationary_at_its_optimum():
    """L = A / tau."""
    ratio = math.exp(0.05 / 0.1 / 2)
    assert _hand("kimi_k15", [ratio, ratio], 0.05)[1] == pytest.approx([0, 0], abs=1e-12)


@pytest.mark.parametrize(("name", "factor"), [("kimi_k15", 1.0), ("kimi_k2", 0.2), ("dro", 1.0)])
@pytest.mark.parametrize("ratios", [[math.exp(15)] * 2, [math.exp(-30), 1.0]])
def test_pull_towards_the_proximal_policy_grows_with_the_distance(name: str, factor: float, ratios: list[float]):
    """Without advantage the gradient is -tau L, of the row (L is 30 and -30) or, with dro, of the token."""
    logs = [math.log(r) for r in ratios]
    want = [-0.1 * log for log in (logs if name == "dro" else [sum(logs)] * 2)]
    assert _hand(name, ratios, 0.0)[1] == pytest.approx([factor * w for w in want])


def test_dppo_looks_at_probabilities():
    """From 0.001 to 0.01: ratio 10, free. From 0.6 to 0.9: ratio 1.5, but 0.3 of the mass: cut."""
    value, gradient = _hand("dppo_tv", [10.0], 1.0, start=0.001)
    assert gradient == pytest.approx([10])
    assert not value.cut_K.any()
    value, gradient = _hand("dppo_tv", [1.5], 1.0, start=0.6)
    assert gradient == [0]
    assert value.high_K.all()
    assert _hand("dppo_tv", [1.5], -1.0, start=0.6)[1] == pytest.approx([-1.5])  # it is on its way back
    assert _hand("ipo", [1.5], -1.0, start=0.6)[1] == [0]


def test_dppo_kl_by_hand():
    """p = 1/2, pi = 3/4: 1/2 log(2/3) + 1/2 log 2 = 1/2 log(4/3) = 0.1438."""
    for bound, want in ((0.14, 0.0), (0.15, 1.5)):
        got = _hand("dppo_kl", [1.5], 1.0, start=0.5, mask_high=bound)[1]
        assert got == pytest.approx([want])


def test_dro_pulls_tokens_without_advantage():
    assert _hand("dro", [math.e], 0.0)[1] == pytest.approx([-0.1])
    assert _hand("dro", [1.0], 3.0)[1] == pytest.approx([3.0])


def test_rows_sums_by_hand():
    rows = TrainingRows(torch.tensor([0, 0, 0, 3, 3]), like=torch.zeros(5))
    values = torch.tensor([1.0, 2.0, 4.0, 10.0, 20.0])
    assert rows.sum(values).tolist() == [7, 7, 7, 30, 30]
    assert rows.mean(values).tolist() == pytest.approx([7 / 3] * 3 + [15] * 2)
    assert rows.to_go(values).tolist() == [7, 6, 4, 30, 20]
    assert rows.any(values > 15).tolist() == [False] * 3 + [True] * 2
    assert rows.length_K.tolist() == [3, 3, 3, 2, 2]
    assert mean(rows.mean(values).tolist()) == pytest.approx(7.4)
