"""The training worker: a batch of rows in, one optimizer step, numbers out. Synchronous; the runtime decides where it runs.

    for each micro-batch:   fold -> forward -> log-probs of the trained tokens -> loss -> add its gradient
    then, once:             all finite? -> gradient norm -> clip -> AdamW

With ``algo.num_iterations`` above 1 this is done again and again with the same batch; an objective that settles something over
the whole step first has it forwarded without gradient (``Objective.survey``).

No update is made before everything in it was found finite; otherwise DivergedError, and weights and optimizer are what they
were before that update.
What of the model is trained, shipped and saved is for the adapters to say (adapters/).

A batch without rows, or without any gradient (equal rewards, all tokens rejected), leaves weights and optimizer untouched: what
AdamW remembers, and weight decay, would move them though nothing was learned. It counts as a step of the learning-rate schedule,
which follows the number of batches so that it ends with the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corrente.adapters.base import Adapters, Frozen
from corrente.algo.base import Constants, Loss, Objective, Trained
from corrente.backends.base import Backend
from corrente.common.imports import load_object
from corrente.config import RunConfig
from corrente.data.reductions import Accumulator
from corrente.data.types import Batch
from corrente.errors import CheckpointError, DivergedError
from corrente.learner import checkpoint, metrics
from corrente.learner.balance import Balance
from corrente.learner.base import Pulse, unheard
from corrente.learner.guides import guides
from corrente.learner.head import TokenLogprobs
from corrente.learner.lessons import mean_logprobs
from corrente.learner.model import Policy, compute_dtype, load_model, recompute_activations
from corrente.learner.packing import Inputs, Pack, padded_tokens, plan
from corrente.learner.schedule import learning_rate

OBJECTIVE = "corrente.algo.losses:PolicyObjective"
BACKENDS = {"single": "corrente.backends.single:SingleDevice"}
ADAPTERS = {
    "full": "corrente.adapters.full:FullAdapters",
    "lora": "corrente.adapters.lora:LoraAdapters",
    "lora_merged": "corrente.adapters.merged:MergedAdapters",
}


class TorchLearner:
    """Owns the policy in training, its optimizer and, with ``algo.beta`` > 0, the frozen policy the KL is measured to.

    ``config.model.path`` must be a directory. Raises ConfigError when it holds no causal LM, or none the adapters fit.
    """

    def __init__(self, config: RunConfig, *, device: str = "cpu") -> None:
        self._config = config
        self._device = device
        self._source = Path(config.model.path)
        self._objective: Objective = load_object(OBJECTIVE)(config)
        self._adapters: Adapters = load_object(ADAPTERS[_kind(config.adapters)])(
            config.adapters, source=self._source, load=partial(load_model, device=device), seed=config.run.seed
        )
        model = self._adapters.model
        if config.learner.gradient_checkpointing:
            recompute_activations(model)
        dtype = compute_dtype(config.model.dtype, device)
        self._policy = Policy(model, temperature=config.sampling.temperature, dtype=dtype)
        self._frozen: Frozen | None = None
        if self._objective.needs_reference:
            self._frozen = self._adapters.frozen()
            self._reference = Policy(self._frozen.model, temperature=config.sampling.temperature, dtype=dtype)
        coef = config.learner.router_aux_loss_coef
        self._balance = Balance(model, coef=coef) if coef else None
        self._backend: Backend = load_object(BACKENDS[_kind(config.backend)])(
            model.parameters(), learner=config.learner
        )
        self._steps = 0

    def step(self, batch: Batch, *, pulse: Pulse = unheard) -> dict[str, float]:
        """One optimizer step; see metrics.py for what comes back. ``pulse`` is called before each forward pass. Raises
        DivergedError, AlignmentError."""
        began, self._policy.pulse = time.perf_counter(), pulse
        lr = learning_rate(self._config.learner, step=self._steps, steps=self._config.run.steps)
        out = self._update(batch, lr) if batch.rows else metrics.nothing_trained()
        self._steps += 1
        return out | {"train/lr": lr, "learner/busy_s": time.perf_counter() - began}

    def tensors(self) -> Mapping[str, Tensor]:
        """What is shipped to the engines, by name, of the present weights; see Adapters."""
        return self._adapters.tensors()

    def save(self, path: Path) -> None:
        """Write model, optimizer, step count and RNG into an existing empty directory. Raises CheckpointError."""
        state = {"optimizer": self._backend.state(), "steps": self._steps}
        checkpoint.write(path, weights=self._adapters.write, source=self._source, state=state)

    def load(self, path: Path) -> None:
        """Restore what ``save`` wrote; the reference stays the initial model. Raises CheckpointError; then nothing changed."""
        weights, state = checkpoint.read(path, weights=self._adapters.read, device=self._device)
        try:
            steps, optimizer = int(state["steps"]), state["optimizer"]
            self._backend.restore(optimizer)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint {path} does not fit this run: {error}") from error
        self._adapters.assign(weights)
        checkpoint.restore_rng(state)
        self._steps = steps

    def _update(self, batch: Batch, lr: float) -> dict[str, float]:
        weights_R = self._objective.row_weights(batch)
        budget = self._config.learner.micro_batch_tokens
        lessons = bool(self._objective.needs_lessons)
        packs = plan(batch.rows, weights_R=weights_R, version=batch.version, budget=budget, lessons=lessons)
        constants = self._survey(packs)
        reports = [self._iteration(batch, packs, constants, lr) for _ in range(self._objective.updates)]
        return reports[0] | metrics.of_iterations(reports)

    def _iteration(
        self, batch: Batch, packs: tuple[Pack, ...], constants: Sequence[Constants | None], lr: float
    ) -> dict[str, float]:
        """One update from the whole batch."""
        try:
            total, distinct, sums = self._gradient(packs, constants, fresh=batch.step % self._config.sync.every == 0)
            norm = self._backend.norm()
            if not math.isfinite(norm):
                raise DivergedError(f"gradient norm is {norm} at step {batch.step}, version {batch.version}")
        except BaseException:
            self._backend.discard()
            raise
        if norm:
            self._backend.step(lr=lr, norm=norm, max_norm=self._config.learner.max_grad_norm)
        else:
            self._backend.discard()
        return metrics.reported(sums) | {
            "train/loss": total,
            "train/grad_norm": norm,
            "train/distinct_tokens": float(distinct),
            "train/padded_tokens": float(padded_tokens(batch.rows)),
            **({} if self._balance is None else {"train/router_aux_loss": self._balance.value}),
        }

    def _survey(self, packs: tuple[Pack, ...]) -> Sequence[Constants | None]:
        """What the objective settles over the whole step before its first update, per micro-batch; None where nothing is."""
        if not self._objective.needs_survey:
            return [None] * len(packs)
        with torch.no_grad():
            return self._objective.survey([self._trained(pack, *self._policy.logprobs(pack)) for pack in packs])

    def _gradient(
        self, packs: tuple[Pack, ...], constants: Sequence[Constants | None], *, fresh: bool
    ) -> tuple[float, int, Accumulator]:
        """Accumulate the gradient of a whole step; returns its loss, positions forwarded, and what its tokens report."""
        total, distinct, sums = 0.0, 0, Accumulator()
        trained = sum(len(pack.targets_K) for pack in packs)
        with self._training():
            if self._balance is not None:
                self._balance.settle(self._policy, packs)
            for pack, fixed in zip(packs, constants, strict=True):
                loss, inputs, trace = self._micro_batch(pack, fixed, trained=trained)
                value = float(loss.total.detach())
                if not math.isfinite(value):
                    raise DivergedError(f"loss is {value} on {len(pack.targets_K)} tokens of {len(pack.contexts)} rows")
                self._backend.accumulate(loss.total)
                total += value
                distinct += inputs.tokens.size
                metrics.record(sums, trace, fresh=fresh)
        return total, distinct, sums

    def _micro_batch(
        self, pack: Pack, constants: Constants | None, *, trained: int
    ) -> tuple[Loss, Inputs, metrics.Trace]:
        out, inputs = self._policy.logprobs(pack, likeliest=self._objective.needs_lessons == "likeliest")
        balance = self._balance.loss(inputs) if self._balance is not None else None
        part = self._trained(pack, out, inputs, reference_K=self._reference_logprobs(pack))
        loss = self._objective(
            part.logprobs_K,
            behaviour_K=part.behaviour_K,
            advantages_K=part.advantages_K,
            weights_K=part.weights_K,
            row_K=part.row_K,
            lags_K=part.lags_K,
            entropy_K=part.entropy_K,
            reference_K=part.reference_K,
            guides=part.guides,
            constants=constants,
            trained=trained,
        )
        trace = metrics.Trace(
            logprobs_K=_numpy(out.logprobs_K),
            behaviour_K=pack.behaviour_K.astype(np.float64),
            reference_K=None if part.reference_K is None else _numpy(part.reference_K),
            entropy_K=_numpy(out.entropy_M)[inputs.slot_K],
            lags_K=pack.lags_K,
            mixed_K=pack.mixed_K,
            low_K=loss.low_K.cpu().numpy(),
            high_K=loss.high_K.cpu().numpy(),
            cut_K=loss.cut_K.cpu().numpy(),
            rejected_K=loss.rejected_K.cpu().numpy(),
            whole_K=loss.whole_K.cpu().numpy(),
            teacher_K=mean_logprobs(pack.said, len(pack.targets_K)) if self._objective.needs_lessons else None,
        )
        return loss if balance is None else replace(loss, total=loss.total + balance), inputs, trace

    def _trained(self, pack: Pack, out: TokenLogprobs, inputs: Inputs, *, reference_K: Tensor | None = None) -> Trained:
        dtype, device = out.logprobs_K.dtype, out.logprobs_K.device
        return Trained(
            logprobs_K=out.logprobs_K,
            behaviour_K=torch.as_tensor(pack.behaviour_K, dtype=dtype, device=device),
            advantages_K=torch.as_tensor(pack.advantages_K, dtype=dtype, device=device),
            weights_K=torch.as_tensor(pack.weights_K, dtype=dtype, device=device),
            row_K=torch.as_tensor(pack.row_K, device=device),
            lags_K=torch.as_tensor(pack.lags_K, device=device),
            entropy_K=out.entropy_M[torch.as_tensor(inputs.slot_K, device=device)],
            reference_K=reference_K,
            guides=guides(pack.said, out.also_KJ, like=out.logprobs_K),
        )

    def _reference_logprobs(self, pack: Pack) -> Tensor | None:
        if self._frozen is None:
            return None
        with torch.no_grad(), self._frozen.context():
            return self._reference.logprobs(pack)[0].logprobs_K

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Hugging Face recomputes activations only in training mode; the model's own dropout is off in either mode."""
        model = self._policy.model
        model.train(self._config.learner.gradient_checkpointing)
        try:
            yield
        finally:
            model.eval()


def _numpy(tensor: Tensor) -> NDArray[np.float64]:
    return tensor.detach().double().cpu().numpy()


def _kind(section: Any) -> str:
    return section.__struct_config__.tag
