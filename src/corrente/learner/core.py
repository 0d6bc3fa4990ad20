"""The training worker: a batch of rows in, one optimizer step, numbers out. Synchronous; the runtime decides where it runs.

    the gradient of the whole step (gradient.py) -> all finite? -> gradient norm -> clip -> AdamW

With ``algo.num_iterations`` above 1 this is done again and again with the same batch.

No update is made before everything in it was found finite; otherwise DivergedError, and weights and optimizer are what they
were before that update.
The adapters decide which parameters are trained, shipped and saved (adapters/); the backend decides where they live, whole or
sharded (backends/). Nothing else here reads a parameter.

A batch without rows, or without any gradient (equal rewards, all tokens rejected), leaves weights and optimizer untouched:
AdamW's moments, and weight decay, would move them though nothing was learned. It counts as a step of the learning-rate schedule,
which follows the number of batches so that it ends with the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from corrente import adapters, backends
from corrente.adapters.base import Adapters
from corrente.algo.base import Constants, Objective
from corrente.backends.base import Backend, StepOptimizer
from corrente.common.imports import load_object
from corrente.config import RunConfig
from corrente.config.schema import kind_of
from corrente.data.types import Batch
from corrente.errors import CheckpointError, DivergedError
from corrente.learner import checkpoint, metrics
from corrente.learner.balance import LoadBalance
from corrente.learner.base import Pulse, no_pulse
from corrente.learner.gradient import Reference, StepGradient
from corrente.learner.model import compute_dtype, load_model, recompute_activations
from corrente.learner.packing import Pack, padded_tokens, plan_packs
from corrente.learner.policy import Policy
from corrente.learner.schedule import learning_rate

OBJECTIVE = "corrente.algo.losses:PolicyObjective"


class TorchLearner:
    """Owns the policy in training, its optimizer and, where the objective has a KL, the frozen policy that it is measured to.

    ``config.model.path`` must be a directory. Raises ConfigError when it holds no causal LM, or none the adapters fit.
    """

    def __init__(self, config: RunConfig, *, device: str = "cpu") -> None:
        self._config = config
        self._device = device
        self._source = Path(config.model.path)
        self.objective: Objective = load_object(OBJECTIVE)(config)
        self.backend: Backend = load_object(backends.KINDS[kind_of(config.backend)])(
            config.backend, learner=config.learner
        )
        self._adapters: Adapters = load_object(adapters.KINDS[kind_of(config.adapters)])(
            config.adapters,
            source=self._source,
            load=partial(load_model, device=device, trust_remote_code=config.model.trust_remote_code),
            seed=config.run.seed,
            trust_remote_code=config.model.trust_remote_code,
        )
        if config.learner.gradient_checkpointing:
            recompute_activations(self.model)
        dtype = compute_dtype(config.model.dtype, device)
        self.policy, self._reference = self._build_policies(temperature=config.sampling.temperature, dtype=dtype)
        coef = config.learner.router_aux_loss_coef
        balance = LoadBalance(self.model, coef=coef) if coef else None
        self.optimizer: StepOptimizer = self.backend.optimizer(self.policy)
        self.gradient = StepGradient(
            self.policy,
            objective=self.objective,
            backend=self.backend,
            reference=self._reference,
            balance=balance,
            recompute=config.learner.gradient_checkpointing,
        )
        self._steps = 0

    @property
    def model(self) -> Any:
        """The Hugging Face model in training, adapters included."""
        return self._adapters.model

    def step(self, batch: Batch, *, pulse: Pulse = no_pulse) -> dict[str, float]:
        """Take one optimizer step; metrics.py describes the numbers it returns.

        ``pulse`` is called before each forward pass. Raises DivergedError, AlignmentError.
        """
        began, self.gradient.pulse = time.perf_counter(), pulse
        lr = learning_rate(self._config.learner, step=self._steps, steps=self._config.run.steps)
        out = self._update(batch, lr) if batch.rows else metrics.empty_report()
        self._steps += 1
        self._move_reference()
        return out | {"train/lr": lr, "learner/busy_s": time.perf_counter() - began}

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors to ship to the engines, by name, of the present weights; see Adapters."""
        return self._adapters.tensors()

    def save(self, path: Path) -> None:
        """Write model, optimizer, step count and RNG into an existing empty directory. Raises CheckpointError."""
        state: dict[str, Any] = {"optimizer": self.optimizer.state(), "steps": self._steps}
        if self._moving is not None:
            state["reference"] = self._moving.state_dict()
        code = self._config.model.trust_remote_code
        checkpoint.write_checkpoint(path, weights=self._adapters.write, source=self._source, state=state, code=code)

    def load(self, path: Path) -> None:
        """Restore a checkpoint that ``save`` wrote. The reference stays the initial model, unless it moves with the policy.

        Raises CheckpointError, and then nothing has changed.
        """
        weights, state = checkpoint.read_checkpoint(path, weights=self._adapters.read, device=self._device)
        try:
            steps, optimizer = int(state["steps"]), state["optimizer"]
            moved = state["reference"] if self._moving is not None else None
            self.optimizer.restore(optimizer)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint {path} does not fit this run: {error}") from error
        self._adapters.assign(weights)
        if self._moving is not None and moved is not None:
            self._moving.load_state_dict(moved)
        checkpoint.restore_rng(state)
        self._steps = steps

    def plan_packs(self, batch: Batch) -> tuple[Pack, ...]:
        """The micro-batches of a step, as the objective weighs their rows."""
        return plan_packs(
            batch.rows,
            weights_R=self.objective.row_weights(batch, totals=self.backend.totals),
            version=batch.version,
            budget=self._config.learner.micro_batch_tokens,
            teachers=bool(self.objective.needs_teachers),
        )

    def _build_policies(self, **settings: Any) -> tuple[Any, Reference | None]:
        """The policy in training and the reference, both prepared. A reference without parameters of its own is the same module,
        called while its adapters are switched."""
        frozen = self._adapters.frozen() if self.objective.needs_reference else None
        policy = self.backend.prepare(Policy(self.model, **settings))
        if frozen is None:
            return policy, None
        shared = frozen.model is self.model
        own = policy if shared else self.backend.prepare(Policy(frozen.model, **settings))
        return policy, Reference(own, frozen.context)

    @property
    def _moving(self) -> nn.Module | None:
        """The reference where it moves with the policy; None where it stays the initial model."""
        return self._reference.policy if self._reference and self._config.algo.ref_model_sync_steps else None

    def _move_reference(self) -> None:
        """Move the reference towards the policy where a step has reached a multiple of algo.ref_model_sync_steps updates."""
        moving, algo, updates = self._moving, self._config.algo, self.objective.updates
        if moving is None:
            return
        done = self._steps * updates
        if done // algo.ref_model_sync_steps == (done - updates) // algo.ref_model_sync_steps:
            return
        with torch.no_grad():
            for own, trained in zip(moving.parameters(), self.policy.parameters(), strict=True):
                own.lerp_(trained.to(own.dtype), algo.ref_model_mixup_alpha)

    def _update(self, batch: Batch, lr: float) -> dict[str, float]:
        packs = self.plan_packs(batch)
        constants = self.gradient.survey(packs)
        reports = [self._iterate(batch, packs, constants, lr) for _ in range(self.objective.updates)]
        return reports[0] | metrics.iteration_report(reports)

    def _iterate(
        self, batch: Batch, packs: Sequence[Pack], constants: Sequence[Constants | None], lr: float
    ) -> dict[str, float]:
        """Make one update from the whole batch."""
        try:
            report = self.gradient.accumulate(packs, constants, fresh=batch.step % self._config.sync.every == 0)
            norm = self.optimizer.norm()
            if not math.isfinite(norm):
                raise DivergedError(f"gradient norm is {norm} at step {batch.step}, version {batch.version}")
        except BaseException:
            self.backend.discard()
            raise
        if norm:
            self.optimizer.step(lr=lr, norm=norm, max_norm=self._config.learner.max_grad_norm)
        else:
            self.backend.discard()
        return metrics.step_report(report) | {
            "train/grad_norm": norm,
            "train/padded_tokens": float(padded_tokens(batch.rows)),
        }
