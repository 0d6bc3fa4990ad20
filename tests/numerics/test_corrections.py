"""Corrections one by one by hand, together in their order, over a whole step, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from corrente.algo import checks, corrections, entropy, kl, ratio
from corrente.algo.base import Trained
from corrente.algo.losses import PolicyObjective
from corrente.algo.rows import TrainingRows
from corrente.config import Algo, GrpoObjective, ReinforceObjective, RunConfig, Staleness
from corrente.config.load import parse_config
from corrente.errors import ConfigError


def _f(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _config(algo: dict[str, Any], staleness: dict[str, Any] | None = None) -> RunConfig:
    return parse_config({"algo": algo, "staleness": staleness or {}})


def _correct(
    ratios: Sequence[float], advantages: Sequence[float] | None = None, *, row=None, lags=None, **settings: Any
):
    """Weights and kept tokens of tokens with these ratios to the behaviour policy; 0 marks nothing else."""
    logs = _f(*ratios).log()
    found = corrections.correct(
        log_ratio_K=logs,
        log_rho_K=logs,
        advantages_K=torch.ones_like(logs) if advantages is None else _f(*advantages),
        lags_K=None if lags is None else torch.tensor(lags),
        rows=TrainingRows(None if row is None else torch.tensor(row), like=logs),
        settings=Staleness(**settings),
    )
    return found.weight_K.tolist(), found.kept_K.tolist()


# ---- rules ------------------------------------------------------------------------------------------------------------


def test_nothing_is_corrected_unless_asked():
    assert _correct([0.1, 9.0]) == ([1, 1], [True, True])


@pytest.mark.parametrize(
    ("settings", "weights", "kept"),
    [
        ({"correct": "tis"}, [0.5, 1.5, 2.0], [1, 1, 1]),
        ({"correct": "tis", "correct_floor": 0.8}, [0.8, 1.5, 2.0], [1, 1, 1]),
        ({"correct": "mis"}, [0.5, 1.5, 0.0], [1, 1, 0]),
        ({"correct": "icepop", "correct_floor": 0.6}, [0.0, 1.5, 0.0], [0, 1, 0]),
        # product of 0.5, 1.5, 4 is 3; geometric mean 1.4422
        ({"correct": "tis", "correct_level": "sequence"}, [2.0] * 3, [1, 1, 1]),
        ({"correct": "mis", "correct_level": "sequence"}, [0.0] * 3, [0, 0, 0]),
        ({"correct": "tis", "correct_level": "geometric"}, [3 ** (1 / 3)] * 3, [1, 1, 1]),
        ({"correct": "mis", "correct_level": "geometric"}, [3 ** (1 / 3)] * 3, [1, 1, 1]),
    ],
)
def test_weights_by_hand(settings, weights, kept):
    got, left = _correct([0.5, 1.5, 4.0], **settings)
    assert got == pytest.approx(weights)
    assert left == [bool(flag) for flag in kept]


def test_caps_differ_by_sign():
    got, _ = _correct([3.0, 3.0], [1.0, -1.0], correct="tis", correct_cap=2.5, correct_cap_negative=1.2)
    assert got == pytest.approx([2.5, 1.2])
    _, kept = _correct([1.5, 1.5], [1.0, -1.0], correct="mis", correct_cap_negative=1.2)
    assert kept == [True, False]


def test_veto_leaves_out_the_whole_sequence():
    _, kept = _correct([1.0, 1e-5, 1.0, 1.0], row=[0, 0, 1, 1], veto=1e-4)
    assert kept == [False, False, True, True]


@pytest.mark.parametrize(
    ("band", "value"),
    [
        ("geometric", math.sqrt(2 * 1.5)),
        ("product", 3.0),
        ("k2", (math.log(2) ** 2 + math.log(1.5) ** 2) / 4),
        ("k3", (2 - 1 - math.log(2) + 1.5 - 1 - math.log(1.5)) / 2),
    ],
)
def test_bands_by_hand(band, value):
    """The statistic of a row with ratios 2 and 1.5, from both sides of either bound."""
    for low, high, inside in (
        (0.0, value * 1.001, 1),
        (0.0, value * 0.999, 0),
        (value * 0.999, 99.0, 1),
        (value * 1.001, 99.0, 0),
    ):
        _, kept = _correct([2.0, 1.5, 1.0], row=[0, 0, 1], band=band, band_low=low, band_high=high)
        assert kept[:2] == [bool(inside)] * 2


def test_off_policy_mask_leaves_out_bad_sequences_alone():
    """Mean of -log(1/2) and -log(1/8): log 4."""
    for threshold, kept in ((1.3, [False, False]), (1.4, [True, True])):
        assert _correct([0.5, 0.125], [-1.0, -1.0], off_policy_mask_threshold=threshold)[1] == kept
        assert _correct([0.5, 0.125], [1.0, 1.0], off_policy_mask_threshold=threshold)[1] == [True, True]


def test_age_decays_weights():
    got, _ = _correct([1.0, 1.0, 3.0], lags=[0, 2, 1], decay=0.5, correct="tis")
    assert got == pytest.approx([1, 0.25, 1.0])


def test_rules_compose_whole_sequences_first_then_tokens():
    """Row 0 falls to the veto. Row 1 passes the band on its product 2, and loses the token above the cap. Age comes last."""
    got, kept = _correct(
        [1e-6, 1.0, 4.0, 0.5],
        row=[0, 0, 1, 1],
        lags=[0, 0, 1, 1],
        veto=1e-4,
        band="product",
        band_high=2.5,
        correct="mis",
        correct_cap=3.0,
        decay=0.9,
    )
    assert got == pytest.approx([0, 0, 0, 0.45])
    assert kept == [False, False, False, True]


def test_statistics_are_of_all_tokens_also_those_left_out():
    """Without its masked token row 0 would have the product 1 and pass."""
    _, kept = _correct([4.0, 1.0], band="product", band_high=2.5, correct="mis", correct_cap=3.0)
    assert kept == [False, False]


# ---- which policy -----------------------------------------------------------------------------------------------------


def test_interpolation_by_lag():
    """Lag 0 and, in the limit, old samples: the current policy. Lag 1: the behaviour policy. Lag 4: a quarter of it."""
    got = ratio.interpolate(_f(-1, -1, -1), _f(-3, -3, -3), torch.tensor([0, 1, 4]))
    assert got.tolist() == pytest.approx([-1, -3, -1.5])


@pytest.mark.parametrize(
    ("proximal", "lag", "want"),
    [
        ("recompute", 3, 1.6),  # ratio 1 in value, weight 1.6
        ("interpolate", 0, 1.6),
        ("interpolate", 1, 1.28 * 1.0),  # all of it in the ratio, which is clipped
        ("interpolate", 2, math.sqrt(1.6) ** 2),  # half and half, in logs
    ],
)
def test_decoupled_ratio_and_weight_by_hand(proximal, lag, want):
    """pi / mu = 1.6, cap 2, clip at 1.28."""
    objective = PolicyObjective(RunConfig(algo=Algo(proximal=proximal), staleness=Staleness(correct="tis")))
    loss = objective(
        Trained(
            logprobs_K=_f(math.log(0.8)),
            behaviour_K=_f(math.log(0.5)),
            advantages_K=_f(1),
            weights_K=_f(1),
            lags_K=torch.tensor([lag]),
        )
    )
    assert loss.total.item() == pytest.approx(-want)


def test_auto_takes_the_recomputed_policy_with_a_weight():
    for correct, want in (("none", 1.28), ("tis", 1.6)):
        objective = PolicyObjective(RunConfig(staleness=Staleness(correct=correct)))  # pyright: ignore
        loss = objective(
            Trained(logprobs_K=_f(math.log(0.8)), behaviour_K=_f(math.log(0.5)), advantages_K=_f(1), weights_K=_f(1))
        )
        assert loss.total.item() == pytest.approx(-want)


def test_truncated_reinforce_by_hand():
    objective = PolicyObjective(
        RunConfig(algo=Algo(objective=ReinforceObjective()), staleness=Staleness(correct="tis"))
    )
    logprobs = _f(math.log(0.8), math.log(0.2)).requires_grad_()
    loss = objective(
        Trained(
            logprobs_K=logprobs, behaviour_K=_f(math.log(0.1), math.log(0.2)), advantages_K=_f(1, 3), weights_K=_f(1, 1)
        )
    )
    (gradient,) = torch.autograd.grad(loss.total, logprobs)
    assert gradient.tolist() == pytest.approx([-2.0, -3.0])


# ---- the whole step -----------------------------------------------------------------------------------------------------


def _parts(ratios: Sequence[Sequence[float]], weights: Sequence[Sequence[float]], entropies=None) -> list[Trained]:
    """One micro-batch per inner list, which is one row; behaviour probability 0.1."""
    return [
        Trained(
            logprobs_K=_f(*r).log() + math.log(0.1),
            behaviour_K=torch.full((len(r),), math.log(0.1), dtype=torch.float64),
            advantages_K=torch.ones(len(r), dtype=torch.float64),
            weights_K=_f(*w),
            entropy_K=_f(*(entropies[n] if entropies else [1.0] * len(r))),
        )
        for n, (r, w) in enumerate(zip(ratios, weights, strict=True))
    ]


def test_normalised_weights_average_to_one_over_the_step():
    """Weights 1 and 2 (capped) in one micro-batch, 0.5 in the other: mean 7/6."""
    objective = PolicyObjective(RunConfig(staleness=Staleness(correct="tis", normalise=True)))
    found = objective.survey(_parts([[1.0, 4.0], [0.5]], [[1, 1], [1]]))
    assert [w for part in found for w in part.weight_K.tolist()] == pytest.approx([6 / 7, 12 / 7, 3 / 7])


def test_effective_denominator_counts_kept_tokens_of_the_step():
    """Four tokens, one left out: 1/4 becomes 1/3 in every micro-batch."""
    objective = PolicyObjective(RunConfig(algo=Algo(denominator="effective"), staleness=Staleness(correct="mis")))
    assert objective.needs_survey
    parts = _parts([[1.0, 4.0, 1.0], [0.5]], [[0.25] * 3, [0.25]])
    found = objective.survey(parts)
    got = [(w * s).tolist() for w, s in zip([p.weights_K for p in parts], [c.scale_K for c in found], strict=True)]
    assert got[0] == pytest.approx([1 / 3, 0, 1 / 3])
    assert got[1] == pytest.approx([1 / 3])


def test_effective_denominator_of_sequence_means():
    """Two rows of 1/2 each. The first is averaged over the two tokens it keeps; a row that keeps none is no row."""
    objective = PolicyObjective(
        RunConfig(algo=Algo(objective=GrpoObjective(), denominator="effective"), staleness=Staleness(correct="mis"))
    )
    weights = [[1 / 6] * 3, [1 / 2]]
    for second, want in ((0.5, [[1 / 4, 0, 1 / 4], [1 / 2]]), (9.0, [[1 / 2, 0, 1 / 2], [0]])):
        parts = _parts([[1.0, 4.0, 1.0], [second]], weights)
        found = objective.survey(parts)
        for part, constants, expected in zip(parts, found, want, strict=True):
            assert (part.weights_K * constants.scale_K).tolist() == pytest.approx(expected)


def test_effective_denominator_of_sequence_sums_counts_sequences():
    """Two sequences of 1/2 a token each. A token left out leaves its sequence in the count; a sequence of nothing leaves it."""
    algo = Algo(objective=ReinforceObjective(), aggregation="sequence_sum", denominator="effective")
    objective = PolicyObjective(RunConfig(algo=algo, staleness=Staleness(correct="mis")))
    for second, want in ((0.5, [[1 / 2, 0, 1 / 2], [1 / 2]]), (9.0, [[1, 0, 1], [0]])):
        parts = _parts([[1.0, 4.0, 1.0], [second]], [[1 / 2] * 3, [1 / 2]])
        found = objective.survey(parts)
        for part, constants, expected in zip(parts, found, want, strict=True):
            assert (part.weights_K * constants.scale_K).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence_sum"])
def test_rule_that_rejects_nothing_changes_no_weight(aggregation: Any):
    lengths = (100, 300)
    algo = Algo(objective=ReinforceObjective(), aggregation=aggregation, denominator="effective")
    objective = PolicyObjective(RunConfig(algo=algo, staleness=Staleness(correct="mis")))
    of_row = {"token": (1 / 400, 1 / 400), "sequence": (1 / 200, 1 / 600), "sequence_sum": (1 / 2, 1 / 2)}[aggregation]
    parts = _parts([[1.0] * n for n in lengths], [[w] * n for n, w in zip(lengths, of_row, strict=True)])
    for constants in objective.survey(parts):
        torch.testing.assert_close(constants.scale_K, torch.ones_like(constants.scale_K))


def test_step_of_which_nothing_is_kept_has_no_gradient():
    objective = PolicyObjective(
        RunConfig(algo=Algo(denominator="effective"), staleness=Staleness(correct="mis", normalise=True))
    )
    (part,) = _parts([[9.0, 8.0]], [[0.5, 0.5]])
    (constants,) = objective.survey([part])
    logprobs = part.logprobs_K.requires_grad_()
    loss = objective(
        Trained(
            logprobs_K=logprobs, behaviour_K=part.behaviour_K, advantages_K=part.advantages_K, weights_K=part.weights_K
        ),
        constants=constants,
    )
    (gradient,) = torch.autograd.grad(loss.total, logprobs)
    assert gradient.tolist() == [0, 0]
    assert loss.rejected_K.all()


def test_high_entropy_tokens_are_those_of_the_whole_step():
    """Entropies 1..5 over two micro-batches, the top 40 %: at or above the 0.6 quantile, 3.4."""
    assert [flags.tolist() for flags in entropy.highest([_f(1, 5, 2), _f(4, 3)], share=0.4)] == [
        [False, True, False],
        [True, False],
    ]
    assert all(bool(flags.all()) for flags in entropy.highest([_f(1, 5, 2), _f(4, 3)], share=1.0))


def test_entropy_bonus_is_a_mean_whatever_the_aggregation():
    for loss in ("dapo", "grpo", "dr_grpo"):
        objective = PolicyObjective(_config({"objective": {"kind": loss}, "entropy_coef": 0.3}))
        entropies = _f(1.0, 2.0).requires_grad_()
        found = objective(
            Trained(
                logprobs_K=_f(-1, -1),
                behaviour_K=_f(-1, -1),
                advantages_K=_f(0, 0),
                weights_K=_f(0.7, 0.9),
                entropy_K=entropies,
            ),
            trained=6,
        )
        assert found.total.item() == pytest.approx(-0.3 * 3 / 6)
        (gradient,) = torch.autograd.grad(found.total, entropies)
        assert gradient.tolist() == pytest.approx([-0.05, -0.05])


# ---- divergence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_divergence(estimator):
    p, q = _f(0.5, 0.3, 0.2), _f(0.2, 0.5, 0.3)
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl.ESTIMATORS[estimator](p.log(), q.log())).sum(), exact)


@pytest.mark.parametrize(("estimator", "corrected"), [("k1", True), ("k3", True), ("k2", False)])
def test_gradient_of_the_divergence(estimator, corrected):
    """Averaged over y ~ pi, k2 in the loss, and k1 and k3 times the ratio, have the gradient of KL(pi || ref)."""
    logits = _f(0.3, -0.2, 0.5, 0.0).requires_grad_()
    reference = torch.log_softmax(_f(0.1, 0.4, -0.3, 0.2), 0)
    logprobs = torch.log_softmax(logits, 0)
    (want,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    objective = PolicyObjective(RunConfig(algo=Algo(beta=1.0, kl=estimator, use_bias_correction_kl=corrected)))
    loss = objective(
        Trained(
            logprobs_K=logprobs,
            behaviour_K=logprobs.detach(),
            advantages_K=torch.zeros(4, dtype=torch.float64),
            weights_K=logprobs.detach().exp(),
            reference_K=reference,
        )
    )
    (got,) = torch.autograd.grad(loss.total, logits)
    torch.testing.assert_close(got, want)


def test_divergence_in_the_reward_is_charged_to_what_led_to_it():
    """k1 of 0.5, 0 and 1: returns 1.5, 1, 1, times beta 0.1, off an advantage of 2."""
    objective = PolicyObjective(RunConfig(algo=Algo(beta=0.1, kl="k1", kl_in="reward")))
    logprobs = _f(-1.0, -1.0, -1.0).requires_grad_()
    loss = objective(
        Trained(
            logprobs_K=logprobs,
            behaviour_K=_f(-1, -1, -1),
            advantages_K=_f(2, 2, 2),
            weights_K=_f(1, 1, 1),
            reference_K=_f(-1.5, -1.0, -2.0),
        )
    )
    (gradient,) = torch.autograd.grad(loss.total, logprobs)
    assert gradient.tolist() == pytest.approx([-1.85, -1.9, -1.9])


# ---- refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "staleness", "words"),
    [
        (
            {"objective": {"kind": "gmpo", "importance_sampling_level": "sequence"}},
            {},
            ("algo.objective.importance_sampling_level", 'not a key of algo.objective.kind = "gmpo"'),
        ),
        ({"objective": {"kind": "dr_grpo"}, "denominator": "effective"}, {}, ("algo.denominator", "fixed")),
        ({"objective": {"kind": "bnpo"}, "aggregation": "fixed"}, {}, ("algo.denominator", "fixed")),
        ({"advantage": {"kind": "rloo", "scale_rewards": "batch"}}, {}, ("algo.advantage.scale_rewards", "rloo")),
        ({"overlong_tokens": 64}, {}, ("algo.overlong_tokens = 64", "sampling.max_tokens = 64")),
        ({"advantage": {"kind": "gdpo"}, "length_penalty": 0.5}, {}, ("algo.length_penalty = 0.5", "gdpo")),
        ({"advantage": {"kind": "maxrl"}, "overlong_tokens": 4}, {}, ("algo.overlong_tokens = 4", "maxrl")),
        ({"proximal": "behaviour"}, {"correct": "tis"}, ("staleness.correct", "algo.proximal")),
        ({"objective": {"kind": "reinforce"}, "proximal": "recompute"}, {}, ("algo.proximal", "reinforce")),
        ({"beta": 0.1, "kl": "k1"}, {}, ("algo.kl", "reward")),
        ({"ref_model_sync_steps": 8}, {}, ("algo.ref_model_sync_steps = 8", "algo.beta")),
        ({"kl_in": "reward"}, {}, ("algo.kl_in", "algo.beta")),
        ({"beta": 0.1, "kl_in": "reward", "use_bias_correction_kl": True}, {}, ("algo.use_bias_correction_kl", "loss")),
        ({}, {"band": "product", "band_low": 1.5}, ("staleness.band_low = 1.5", "around 1")),
        ({}, {"band": "k3", "band_low": 0.1}, ("staleness.band_low = 0.1", "must be 0")),
        ({}, {"correct": "mis", "correct_cap": 0.9}, ("staleness.correct_cap = 0.9", "above 1")),
        ({}, {"correct": "icepop"}, ("staleness.correct_floor = 0", "0.5")),
        ({}, {"correct": "tis", "correct_floor": 1.5}, ("staleness.correct_floor = 1.5", "at most 1")),
        ({}, {"correct": "mis", "correct_floor": 0.5}, ("staleness.correct_floor = 0.5", "icepop")),
        ({"objective": {"tau": 0.2}}, {}, ("algo.objective.tau", "kimi_k15")),
        ({"objective": {"kind": "ipo", "epsilon": 0.1}}, {}, ("algo.objective.epsilon", "not a key of")),
        ({"overlong_penalty": 2.0}, {}, ("algo.overlong_penalty", "algo.overlong_tokens")),
        ({}, {"correct_cap": 5.0}, ("staleness.correct_cap = 5.0", "none")),
        ({}, {"band_high": 5.0}, ("staleness.band_high = 5", "none")),
        ({}, {"normalise": True}, ("staleness.normalise", "all weights are 1")),
    ],
)
def test_nonsense_is_refused_in_one_line(algo, staleness, words):
    with pytest.raises(ConfigError) as refused:
        checks.check(_config(algo, staleness))
    message = str(refused.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("algo", "staleness"),
    [
        ({}, {}),
        ({"objective": {"kind": "gspo"}}, {}),
        ({"objective": {"kind": "cispo"}}, {}),
        ({"objective": {"kind": "luspo"}}, {}),
        ({"objective": {"kind": "reinforce"}}, {"correct": "tis", "correct_cap": 5.0}),
        ({"objective": {"kind": "kimi_k2", "tau": 1.0}}, {"veto": 1e-4, "decay": 0.9}),
        ({"proximal": "interpolate"}, {"correct": "icepop", "correct_floor": 0.5, "correct_cap": 5.0, "band": "k3"}),
        ({"objective": {"kind": "bnpo"}}, {"correct": "mis", "normalise": True}),
    ],
)
def test_what_makes_sense_is_accepted(algo, staleness):
    checks.check(_config(algo, staleness))


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ({"kind": "gspo", "epsilon": 0.2}, ("algo.objective.epsilon = 0.2", "3e-4")),
        ({"importance_sampling_level": "sequence"}, ("algo.objective.epsilon = 0.2", "of a sequence")),
        ({"kind": "cispo", "epsilon_high": 0.28}, ("algo.objective.epsilon_high = 0.28", "below that of an unchanged")),
    ],
)
def test_bounds_that_hardly_act_are_warned_of(objective, words):
    config = _config({"objective": objective}, {})
    checks.check(config)
    found = checks.cautions(config)
    assert found
    assert all(word in found[0] for word in words)
    assert checks.cautions(_config({}, {})) == []
