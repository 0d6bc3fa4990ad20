"""One optimizer step: its gradient, what it leaves alone, what it refuses, what it reports, and what a checkpoint keeps."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.numerics.learner_continuation import check_continues, same, weights
from transformers import AutoModelForCausalLM, get_scheduler
from transformers.optimization import Adafactor

from corrente import config as c
from corrente.algo.base import Trained
from corrente.algo.losses import PolicyObjective
from corrente.backends.base import StepOptimizer
from corrente.backends.optimizer import LearnerOptimizer
from corrente.backends.single import SingleDevice
from corrente.config import RunConfig
from corrente.config.load import parse_config
from corrente.data.types import Batch, Row, Sampling
from corrente.errors import CheckpointError, ConfigError, DivergedError
from corrente.learner.core import TorchLearner
from corrente.learner.model import compute_dtype
from corrente.learner.packing import plan_packs
from corrente.learner.policy import Policy
from corrente.learner.schedule import check_schedule, learning_rate


def _config(path: Path, **sections: Any) -> RunConfig:
    return RunConfig(**({"model": c.Model(path=str(path)), "learner": c.LearnerConfig(lr=1e-2)} | sections))


def _empty(version: int = 5) -> Batch:
    return Batch(step=0, version=version, rows=(), sequences=8, tokens=30)


def _on_policy(model: Any, batch: Batch, plain_logprobs: Callable[..., Any], **kwargs: Any) -> Batch:
    """The batch with behaviour log-probs that are the model's own."""
    rows = []
    for row, values in zip(batch.rows, plain_logprobs(model, batch.rows, **kwargs), strict=True):
        logprobs = np.zeros(len(row.tokens), np.float32)
        logprobs[row.loss_mask] = values.detach().numpy()
        rows.append(msgspec.structs.replace(row, logprobs=logprobs))
    return msgspec.structs.replace(batch, rows=tuple(rows))


# ---- the gradient -------------------------------------------------------------------------------------------------------------


def _plain_gradient(
    model: Any, batch: Batch, objective: PolicyObjective, logprobs: Callable[..., Any]
) -> dict[str, torch.Tensor]:
    """One backward over plain rows, the denominator applied once: what every other way must equal."""
    weights_R = objective.row_weights(batch)
    model.zero_grad()
    flat = logprobs(model, batch.rows)
    rows = [torch.from_numpy(row.loss_mask) for row in batch.rows]
    loss = objective(
        Trained(
            logprobs_K=torch.cat(flat),
            behaviour_K=torch.cat(
                [torch.from_numpy(r.logprobs)[m].double() for r, m in zip(batch.rows, rows, strict=True)]
            ),
            advantages_K=torch.cat(
                [torch.from_numpy(r.advantages)[m].double() for r, m in zip(batch.rows, rows, strict=True)]
            ),
            weights_K=torch.cat(
                [torch.full((len(f),), w, dtype=torch.float64) for f, w in zip(flat, weights_R, strict=True)]
            ),
        )
    )
    loss.total.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        ("llama", "dapo"),
        ("llama", "grpo"),
        ("llama", "dr_grpo"),
        ("qwen3", "dapo"),
        ("gpt2", "grpo"),
        ("mistral", "dapo"),
    ],
)
def test_gradient_is_the_same_for_every_split(name, aggregation, build_model, build_batch, plain_logprobs):
    """Folded or padded, in one micro-batch, a few, or one per row: equal to a plain loop, in float64."""
    model, batch = build_model(name), build_batch(5, 3)
    objective = PolicyObjective(RunConfig(algo=parse_config({"algo": {"objective": {"kind": aggregation}}}).algo))
    want = _plain_gradient(model, batch, objective, plain_logprobs)
    counts = set()
    for folds in (True, False):
        policy = Policy(model)
        policy.traits = policy.traits._replace(prefix_tree=policy.traits.prefix_tree and folds)
        for budget in (10_000, 60, 30, 1):
            packs = plan_packs(batch.rows, weights_R=objective.row_weights(batch), version=5, budget=budget)
            counts.add(len(packs))
            model.zero_grad()
            for pack in packs:
                tensors = {
                    name: torch.from_numpy(getattr(pack, name)).double()
                    for name in ("behaviour_K", "advantages_K", "weights_K")
                }
                objective(Trained(logprobs_K=policy(pack).logprobs_K, **tensors)).total.backward()
            for parameter_name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, want[parameter_name], atol=1e-10, rtol=1e-10)
    assert {1, len(batch.rows)} < counts


@pytest.mark.slow
def test_gradient_equals_finite_differences_of_the_loss(build_model, build_batch):
    model, batch = build_model(), build_batch(2, 2)
    objective, policy = PolicyObjective(RunConfig()), Policy(model)
    (pack,) = plan_packs(batch.rows, weights_R=objective.row_weights(batch), version=5, budget=1000)
    tensors = {
        name: torch.from_numpy(getattr(pack, name)).double() for name in ("behaviour_K", "advantages_K", "weights_K")
    }

    def loss() -> torch.Tensor:
        return objective(Trained(logprobs_K=policy(pack).logprobs_K, **tensors)).total

    loss().backward()
    rng = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        at = tuple(int(rng.integers(0, size)) for size in parameter.shape)
        with torch.no_grad():
            parameter[at] += 1e-6
            above = loss().item()
            parameter[at] -= 2e-6
            below = loss().item()
            parameter[at] += 1e-6
        assert parameter.grad[at].item() == pytest.approx((above - below) / 2e-6, abs=1e-7), name


@pytest.mark.slow
def test_step_moves_as_adamw_over_a_plain_loop(model_dir, build_batch, plain_logprobs):
    """Two whole steps, clipping and decay included, against torch's own optimizer on a plain loop."""
    path, batches = model_dir(), [build_batch(seed=1), build_batch(seed=2)]
    learner = c.LearnerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.05, micro_batch_tokens=30)
    core = TorchLearner(_config(path, learner=learner))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    decayed, others = ([p for p in model.parameters() if (p.ndim >= 2) is matrix] for matrix in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )
    for batch in batches:
        _plain_gradient(model, batch, PolicyObjective(RunConfig()), plain_logprobs)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
        assert core.step(batch)["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert norm > 0.05
        optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(core.tensors()[name], tensor, atol=2e-5, rtol=1e-4)


def test_gradient_checkpointing_changes_nothing(model_dir, build_batch):
    path = model_dir()
    plain, checked = (
        TorchLearner(_config(path, learner=c.LearnerConfig(lr=1e-2, gradient_checkpointing=on))) for on in (False, True)
    )
    reports = [core.step(build_batch()) for core in (plain, checked)]
    assert reports[0]["train/grad_norm"] == pytest.approx(reports[1]["train/grad_norm"], rel=1e-6)
    for name, tensor in plain.tensors().items():
        torch.testing.assert_close(checked.tensors()[name], tensor)


def test_dropout_of_the_model_is_off(model_dir, build_batch, plain_logprobs, build_model):
    """GPT-2 comes with dropout 0.1: the ratio of an unchanged policy must be 1 all the same."""
    core = TorchLearner(_config(model_dir("gpt2"), learner=c.LearnerConfig(gradient_checkpointing=True)))
    assert core.model.config.resid_pdrop == 0.1
    batch = _on_policy(build_model("gpt2", dtype=torch.float32), build_batch(), plain_logprobs)
    assert core.step(batch)["mismatch/logprob_gap_max"] < 1e-4


# ---- what is left alone -------------------------------------------------------------------------------------------------------


def _moves_nothing(core: TorchLearner, batch: Batch) -> dict[str, float]:
    """What a step of this batch reports, after it left weights and optimizer as they were."""
    before, state = weights(core), core.optimizer.state()
    moments = {k: {n: t.clone() for n, t in s.items()} for k, s in state["state"].items()}
    report = core.step(batch)
    assert same(weights(core), before)
    after = core.optimizer.state()["state"]
    assert all(torch.equal(after[k][n], t) for k, s in moments.items() for n, t in s.items())
    assert all(parameter.grad is None for parameter in core.model.parameters())
    return report


def test_batch_without_rows_changes_nothing(model_dir, build_batch):
    core = TorchLearner(_config(model_dir(), learner=c.LearnerConfig(lr=1e-2, weight_decay=0.1)))
    core.step(build_batch())
    assert _moves_nothing(core, _empty())["train/tokens"] == 0


@pytest.mark.parametrize("why", ["equal rewards", "all rejected"])
def test_step_without_gradient_changes_nothing_though_the_optimizer_has_momentum(why, model_dir, build_batch):
    learner, batch = c.LearnerConfig(lr=1e-2, weight_decay=0.1), build_batch()
    taught = TorchLearner(_config(model_dir(), learner=learner))
    taught.step(batch)
    if why == "equal rewards":
        core = taught
        flat = [msgspec.structs.replace(row, advantages=np.zeros_like(row.advantages)) for row in batch.rows]
        batch = msgspec.structs.replace(batch, rows=tuple(flat))
    else:
        core = TorchLearner(_config(model_dir(), learner=learner, staleness=c.Staleness(veto=1e9)))
        core.optimizer.restore(taught.optimizer.state())
    report = _moves_nothing(core, batch)
    assert report["train/grad_norm"] == 0
    assert report["train/tokens"] > 0


def test_batch_without_rows_counts_in_the_schedule(model_dir, build_batch):
    learner, run = c.LearnerConfig(lr=1.0, schedule="linear"), c.Run(steps=4)
    core = TorchLearner(_config(model_dir(), learner=learner, run=run))
    assert [core.step(_empty())["train/lr"] for _ in range(4)] == [1.0, 0.75, 0.5, 0.25]


def test_adding_rows_without_advantage_changes_nothing(model_dir, build_batch):
    """What the algorithm leaves out for speed has no gradient; denominators are the batch's own."""
    batch = build_batch()
    idle = [msgspec.structs.replace(row, advantages=np.zeros_like(row.advantages)) for row in build_batch(seed=9).rows]
    lean, full = (TorchLearner(_config(model_dir())) for _ in range(2))
    lean.step(batch)
    full.step(msgspec.structs.replace(batch, rows=(*batch.rows, *idle)))
    for name, tensor in lean.tensors().items():
        torch.testing.assert_close(full.tensors()[name], tensor, atol=1e-5, rtol=1e-4)


def test_masked_positions_may_hold_anything(model_dir, build_batch):
    batch = build_batch()

    def poisoned(row: Row) -> Row:
        holes = {name: np.where(row.loss_mask, getattr(row, name), np.nan) for name in ("logprobs", "advantages")}
        return msgspec.structs.replace(row, **{name: value.astype(np.float32) for name, value in holes.items()})

    clean, dirty = (TorchLearner(_config(model_dir())) for _ in range(2))
    clean.step(batch)
    dirty.step(msgspec.structs.replace(batch, rows=tuple(poisoned(row) for row in batch.rows)))
    assert same(weights(clean), weights(dirty))


@pytest.mark.parametrize("fault", ["logprobs", "weights"])
def test_divergence_raises_and_moves_nothing(fault, model_dir, build_batch):
    core = TorchLearner(_config(model_dir()))
    good = build_batch()
    core.step(good)
    if fault == "weights":
        core.tensors()["model.norm.weight"][0] = math.nan
        bad = good
    else:
        poison = [np.where(row.loss_mask, np.nan, 0).astype(np.float32) for row in good.rows]
        bad = msgspec.structs.replace(
            good, rows=tuple(msgspec.structs.replace(r, logprobs=p) for r, p in zip(good.rows, poison, strict=True))
        )
    before, moments = weights(core), {k: v["exp_avg"].clone() for k, v in core.optimizer.state()["state"].items()}
    with pytest.raises(DivergedError):
        core.step(bad)
    assert all(
        torch.equal(a, b) or a.isnan().any() for a, b in zip(before.values(), weights(core).values(), strict=True)
    )
    assert all(torch.equal(core.optimizer.state()["state"][k]["exp_avg"], m) for k, m in moments.items())
    assert all(parameter.grad is None for parameter in core.model.parameters())


def test_infinite_gradient_of_a_finite_loss_raises(model_dir, build_batch):
    core = TorchLearner(_config(model_dir()))
    before = weights(core)
    core.model.model.embed_tokens.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(DivergedError, match="gradient norm"):
        core.step(build_batch())
    assert same(before, weights(core))


def test_end_of_sequence_is_trained_also_when_it_is_the_padding_token(model_dir, build_model):
    """Token 0, which fills padded rows, ends one of two completions: its log-prob must move up, being the only good one."""
    tokens = [np.array([5, 6, 7, 0], np.int32), np.array([5, 6, 7, 8, 9, 10], np.int32)]
    masks = [np.arange(4) == 3, np.arange(6) >= 3]
    rows = tuple(
        Row(
            group=0,
            tokens=ids,
            loss_mask=mask,
            logprobs=np.where(mask, -2, 0).astype(np.float32),
            versions=np.zeros(len(ids), np.int32),
            advantages=np.where(mask, sign, 0).astype(np.float32),
        )
        for ids, mask, sign in zip(tokens, masks, (1.0, -1.0), strict=True)
    )
    core = TorchLearner(
        _config(model_dir(), algo=c.Algo(objective=c.DapoObjective(epsilon=0.99, epsilon_high=50.0, delta=None)))
    )
    for folds in (True, False):
        core.policy.traits = core.policy.traits._replace(prefix_tree=folds)
        ids = torch.from_numpy(tokens[0]).long()[None]
        before = core.model(input_ids=ids).logits[0, 2].log_softmax(-1)[0].item()
        report = core.step(Batch(step=0, version=0, rows=rows, sequences=2, tokens=4))
        assert report["train/tokens"] == 4
        assert core.model(input_ids=ids).logits[0, 2].log_softmax(-1)[0].item() > before


# ---- what is reported ---------------------------------------------------------------------------------------------------------


def test_ratio_is_one_at_equal_weights(model_dir, build_model, build_batch, plain_logprobs):
    batch = _on_policy(build_model(dtype=torch.float32), build_batch(), plain_logprobs, temperature=0.7)
    core = TorchLearner(_config(model_dir(), sampling=Sampling(temperature=0.7)))
    report = core.step(batch)
    assert report["ratio/mean"] == pytest.approx(1, abs=1e-4)
    assert report["ratio/max"] == pytest.approx(1, abs=1e-3)
    assert report["ratio/ess"] == pytest.approx(1, abs=1e-6)
    assert report["mismatch/logprob_gap_mean"] < 1e-4
    assert report["train/clip_fraction"] == 0


def test_metrics_equal_their_definitions(model_dir, build_model, build_batch, plain_logprobs):
    batch = build_batch()
    report = TorchLearner(_config(model_dir(), learner=c.LearnerConfig(micro_batch_tokens=25))).step(batch)
    logprobs = torch.cat(plain_logprobs(build_model(dtype=torch.float32), batch.rows)).double().detach().numpy()
    behaviour = np.concatenate([row.logprobs[row.loss_mask] for row in batch.rows])
    advantages = np.concatenate([row.advantages[row.loss_mask] for row in batch.rows])
    ratio, lags = np.exp(logprobs - behaviour), batch.lags()
    low, high = (ratio < 0.8) & (advantages < 0), (ratio > 1.28) & (advantages > 0)
    k3 = ratio - 1 - np.log(ratio)
    want = {
        "train/tokens": len(ratio),
        "train/padded_tokens": len(batch.rows) * max(len(row.tokens) for row in batch.rows),
        "train/clip_fraction_low": low.mean(),
        "train/clip_fraction_high": high.mean(),
        "train/clip_fraction": (low | high | ((ratio > 4) & (advantages < 0))).mean(),
        "ratio/mean": ratio.mean(),
        "ratio/max": ratio.max(),
        "kl/behaviour_k3": k3.mean(),
        "ratio/ess": ratio.sum() ** 2 / (ratio**2).sum() / len(ratio),
        "mismatch/logprob_gap_mean": np.abs(logprobs - behaviour)[lags == 0].mean(),
        "mismatch/logprob_gap_max": np.abs(logprobs - behaviour)[lags == 0].max(),
    }
    for name, mine in (
        ("0", lags == 0),
        ("1", lags == 1),
        ("2", lags == 2),
        ("3-4", (lags > 2) & (lags < 5)),
        ("5+", lags > 4),
    ):
        want[f"lag{name}/tokens"] = mine.sum()
        want[f"lag{name}/ratio_mean"] = ratio[mine].mean()
        want[f"lag{name}/ratio_max"] = ratio[mine].max()
        want[f"lag{name}/ess"] = ratio[mine].sum() ** 2 / (ratio[mine] ** 2).sum() / mine.sum()
        want[f"lag{name}/kl_k3"] = k3[mine].mean()
    assert {name: report[name] for name in want} == {
        name: pytest.approx(value, rel=1e-3) for name, value in want.items()
    }
    assert 0 < report["train/entropy"] < math.log(61)


def test_bucket_without_tokens_is_left_out(model_dir, build_batch):
    batch = build_batch()
    fresh = tuple(
        msgspec.structs.replace(row, versions=np.where(row.loss_mask, 3, 0).astype(np.int32)) for row in batch.rows
    )
    report = TorchLearner(_config(model_dir())).step(msgspec.structs.replace(batch, rows=fresh))
    assert {name.partition("/")[0] for name in report if name.startswith("lag")} == {"lag2"}
    assert report["lag2/tokens"] == report["train/tokens"]
    assert not any(name.startswith("mismatch") for name in report)


def test_reference_is_the_initial_model(model_dir, build_batch):
    core = TorchLearner(_config(model_dir(), algo=c.Algo(beta=0.5)))
    first, second = core.step(build_batch()), core.step(build_batch())
    assert first["kl/reference"] == pytest.approx(0, abs=1e-9)
    assert second["kl/reference"] > 1e-4


def test_reference_follows_the_policy_every_so_many_updates(model_dir, build_batch, tmp_path):
    """As TRL mixes it: (1 - alpha) reference + alpha policy; a checkpoint goes on with the mixed one."""
    path = model_dir()
    config = _config(path, algo=c.Algo(beta=0.1, ref_model_sync_steps=2, ref_model_mixup_alpha=0.25))
    core = TorchLearner(config)
    assert core.gradient.reference is not None
    expected = {name: tensor.clone() for name, tensor in core.gradient.reference.policy.named_parameters()}
    for step in range(4):
        core.step(build_batch(seed=step))
        if step % 2:
            now = dict(core.policy.named_parameters())
            expected = {name: 0.75 * tensor + 0.25 * now[name].detach() for name, tensor in expected.items()}
        for name, tensor in core.gradient.reference.policy.named_parameters():
            torch.testing.assert_close(tensor, expected[name])
    (tmp_path / "saved").mkdir()
    core.save(tmp_path / "saved")
    again = TorchLearner(config)
    again.load(tmp_path / "saved")
    batch = build_batch(seed=9)
    assert again.step(batch)["kl/reference"] == pytest.approx(core.step(batch)["kl/reference"], rel=1e-6)
    assert again.gradient.reference is not None
    for name, tensor in again.gradient.reference.policy.named_parameters():
        torch.testing.assert_close(tensor, expected[name])


def test_step_lowers_its_own_loss(model_dir, build_batch):
    core = TorchLearner(_config(model_dir()))
    losses = [core.step(build_batch())["train/loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.01


# ---- schedule -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "warmup", "want"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 2, [0.5, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25, 0, 0]),
        ("linear", 2, [0.5, 1, 1, 0.5, 0]),
        ("cosine", 0, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
    ],
)
def test_schedule_by_hand(schedule, warmup, want):
    learner = c.LearnerConfig(lr=1.0, schedule=schedule, warmup_steps=warmup)
    got = [learning_rate(learner, step=step, steps=4) for step in range(len(want))]
    assert got == [pytest.approx(value, abs=1e-12) for value in want]


@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("polynomial", {"lr_end": 1e-4, "power": 2.0}),
        ("inverse_sqrt", {"timescale": 3}),
        ("cosine_with_min_lr", {"min_lr": 1e-3}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 4}),
    ],
)
def test_schedules_of_transformers_are_theirs(schedule: str, more: dict[str, Any]):
    learner = c.LearnerConfig(lr=0.01, schedule=schedule, warmup_steps=2, schedule_args=more)  # pyright: ignore
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.01)
    theirs = get_scheduler(schedule, optimizer, 2, 12, scheduler_specific_kwargs=more)
    for step in range(12):
        assert learning_rate(learner, step=step, steps=12) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_arguments_that_a_schedule_does_not_take_are_refused():
    for learner, words in (
        (c.LearnerConfig(schedule="polynomial", schedule_args={"cycles": 2}), '"polynomial" does not take them'),
        (c.LearnerConfig(schedule="cosine", schedule_args={"num_cycles": 2}), '"cosine" has none'),
    ):
        with pytest.raises(ConfigError, match=words):
            check_schedule(learner, steps=10)


@pytest.mark.parametrize(
    ("name", "more", "make"),
    [
        ("sgd", {"momentum": 0.9}, lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9)),
        ("adagrad", {}, lambda groups: torch.optim.Adagrad(groups, lr=1e-2)),
        ("rmsprop", {"alpha": 0.9}, lambda groups: torch.optim.RMSprop(groups, lr=1e-2, alpha=0.9)),
        ("adafactor", {}, lambda groups: Adafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False)),
    ],
)
def test_optimizer_moves_as_its_own_class_and_goes_on_from_its_state(name: str, more: dict[str, Any], make: Any):
    def layer() -> torch.nn.Linear:
        torch.manual_seed(0)
        return torch.nn.Linear(4, 3)

    settings = c.LearnerConfig(lr=1e-2, weight_decay=0.1, optimizer=name, optimizer_args=more)  # pyright: ignore
    plain = layer()
    theirs = make([{"params": [plain.weight], "weight_decay": 0.1}, {"params": [plain.bias], "weight_decay": 0.0}])
    ours = layer()
    optimizer = LearnerOptimizer(ours, learner=settings)
    for step in range(4):
        for module in (plain, ours):
            module(torch.full((2, 4), 1.0 + step)).square().sum().backward()
        theirs.step()
        theirs.zero_grad()
        optimizer.step(lr=1e-2, norm=1.0, max_norm=0.0)
        if step == 1:  # as after a restart
            state = copy.deepcopy(optimizer.state())
            optimizer = LearnerOptimizer(ours, learner=settings)
            optimizer.restore(state)
    torch.testing.assert_close(ours.weight, plain.weight)
    torch.testing.assert_close(ours.bias, plain.bias)
    with pytest.raises(ValueError, match=f'the state of the optimizer "{name}"'):
        LearnerOptimizer(layer(), learner=c.LearnerConfig()).restore(optimizer.state())


def test_arguments_that_an_optimizer_does_not_take_are_refused():
    with pytest.raises(ConfigError, match='"sgd" does not take them'):
        LearnerOptimizer(
            torch.nn.Linear(1, 1), learner=c.LearnerConfig(optimizer="sgd", optimizer_args={"momentun": 1})
        )


def test_compute_dtype_is_single_precision_on_a_cpu():
    assert compute_dtype("auto", "cpu") is torch.float32
    assert compute_dtype("bfloat16", "cpu") is torch.bfloat16


def test_bfloat16_keeps_weights_in_single_precision(model_dir, build_batch):
    core = TorchLearner(_config(model_dir(), model=c.Model(path=str(model_dir()), dtype="bfloat16")))
    exact = TorchLearner(_config(model_dir()))
    reports = [learner.step(build_batch()) for learner in (core, exact)]
    assert all(tensor.dtype == torch.float32 for tensor in core.tensors().values())
    assert reports[0]["ratio/mean"] == pytest.approx(reports[1]["ratio/mean"], rel=0.1)
    assert reports[0]["ratio/mean"] != reports[1]["ratio/mean"]


# ---- weights out, weights back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tensors_include_tied_aliases(name, model_dir):
    tensors = TorchLearner(_config(model_dir(name))).tensors()
    table = "model.embed_tokens.weight" if name == "llama" else "transformer.wte.weight"
    assert tensors["lm_head.weight"].data_ptr() == tensors[table].data_ptr()


def test_tensors_stay_where_they_are(model_dir, build_batch):
    core = TorchLearner(_config(model_dir()))
    before = {name: tensor.data_ptr() for name, tensor in core.tensors().items()}
    core.step(build_batch())
    assert {name: tensor.data_ptr() for name, tensor in core.tensors().items()} == before


def test_checkpoint_continues_as_if_never_stopped(model_dir, build_batch, tmp_path):
    config = _config(model_dir(), learner=c.LearnerConfig(lr=1e-2, schedule="linear"), algo=c.Algo(beta=0.1))
    check_continues(config, tmp_path, build_batch, build_batch(seed=1), _empty())


def test_restored_optimizer_keeps_its_moments_and_takes_the_settings_it_is_given():
    def stepped(
        settings: c.LearnerConfig, start: float, state: dict[str, Any] | None = None
    ) -> tuple[StepOptimizer, float]:
        layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(layer.weight, start)
        backend = SingleDevice(c.Single(), learner=settings)
        optimizer = backend.optimizer(backend.prepare(layer))
        if state is not None:
            optimizer.restore(state)
        backend.accumulate(2.0 * layer.weight.sum())
        optimizer.step(lr=0.1, norm=2.0, max_norm=0.0)
        return optimizer, layer.weight.item()

    before, _ = stepped(c.LearnerConfig(), 1.0)
    after, moved = stepped(c.LearnerConfig(betas=(0.5, 0.0), eps=1.0, weight_decay=0.5), 3.0, before.state())
    mean = (0.5 * 0.1 * 2 + 0.5 * 2) / (1 - 0.5**2)  # the first step left 0.1 * 2, at the old beta
    assert moved == pytest.approx(3.0 * (1 - 0.1 * 0.5) - 0.1 * mean / (2 + 1.0))
    assert after.state()["param_groups"][0]["betas"] == (0.5, 0.0)


def test_checkpoint_is_a_model_anyone_can_load(model_dir, build_batch, tmp_path):
    source = model_dir("gpt2")
    core = TorchLearner(_config(source))
    core.step(build_batch())
    (tmp_path / "saved").mkdir()
    core.save(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert same({name: tensor.detach() for name, tensor in model.state_dict().items()}, dict(core.tensors()))
    assert model.config.resid_pdrop == 0.1
    assert (tmp_path / "saved" / "tokenizer_config.json").read_bytes() == (
        source / "tokenizer_config.json"
    ).read_bytes()


def test_load_keeps_tensors_where_they_are(model_dir, build_batch, tmp_path):
    """The weight transport holds on to them."""
    core = TorchLearner(_config(model_dir()))
    (tmp_path / "saved").mkdir()
    core.save(tmp_path / "saved")
    before = {name: tensor.data_ptr() for name, tensor in core.tensors().items()}
    core.load(tmp_path / "saved")
    assert {name: tensor.data_ptr() for name, tensor in core.tensors().items()} == before


@pytest.mark.parametrize("damage", ["no state", "torn state", "torn weights", "other model", "nothing"])
def test_damaged_checkpoint_is_refused_and_the_learner_goes_on(damage, model_dir, build_batch, tmp_path):
    core = TorchLearner(_config(model_dir()))
    core.step(build_batch())
    saved = tmp_path / "saved"
    saved.mkdir()
    source = TorchLearner(_config(model_dir("qwen3"))) if damage == "other model" else core
    source.step(build_batch())
    source.save(saved)
    if damage == "no state":
        (saved / "learner.pt").unlink()
    elif damage.startswith("torn"):
        file = saved / ("learner.pt" if damage == "torn state" else "model.safetensors")
        file.write_bytes(file.read_bytes()[:200])
    elif damage == "nothing":
        saved = tmp_path / "missing"
    before = weights(core)
    with pytest.raises(CheckpointError, match=str(saved)):
        core.load(saved)
    assert same(before, weights(core))
    core.step(build_batch())


def test_checkpoint_that_would_run_code_is_refused(model_dir, tmp_path):
    core = TorchLearner(_config(model_dir()))
    saved = tmp_path / "saved"
    saved.mkdir()
    core.save(saved)
    torch.save({"steps": Path("evil")}, saved / "learner.pt")
    with pytest.raises(CheckpointError, match="damaged"):
        core.load(saved)


def test_save_into_a_missing_directory_is_a_checkpoint_error(model_dir, tmp_path):
    core = TorchLearner(_config(model_dir()))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        core.save(tmp_path / "file" / "saved")


def test_directory_without_a_model_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path"):
        TorchLearner(_config(tmp_path))


def test_weights_that_are_missing_are_refused_and_not_made_up(model_dir, tmp_path):
    shutil.copytree(model_dir(), tmp_path / "lacking")
    weights = load_file(tmp_path / "lacking" / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.base_layer.weight"] = weights.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(weights, tmp_path / "lacking" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.path.*no weights for model\.layers\.1\.self_attn\.q_proj\.weight"):
        TorchLearner(_config(tmp_path / "lacking"))
