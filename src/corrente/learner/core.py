"""The training worker: a batch of rows in, one optimizer step, numbers out. Synchronous; the runtime decides where it runs.

    for each micro-batch:   fold -> forward -> log-probs of the trained tokens -> loss -> add its gradient
    then, once:             all finite? -> gradient norm -> clip -> AdamW

Nothing moves before everything was found finite; otherwise DivergedError, and weights and optimizer are what they were.
A batch without rows leaves weights and optimizer untouched; it counts as a step of the learning-rate schedule, which follows the
number of batches so that it ends with the run.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corrente.algo.base import Loss, Objective
from corrente.backends.base import Backend
from corrente.config import RunConfig
from corrente.errors import CheckpointError, DivergedError
from corrente.learner import checkpoint, metrics
from corrente.learner.model import Policy, compute_dtype, load_model, recompute_activations
from corrente.learner.packing import Inputs, Pack, padded_tokens, plan
from corrente.learner.schedule import learning_rate
from corrente.types import Batch

OBJECTIVE = "corrente.algo.losses:PolicyObjective"
BACKENDS = {"single": "corrente.backends.single:SingleDevice"}


class LearnerCore:
    """Owns the policy in training, its optimizer and, with ``algo.beta`` > 0, the frozen model the KL is measured to.

    ``config.model.path`` must be a directory. Raises ConfigError when it holds no causal LM.
    """

    def __init__(self, config: RunConfig, *, device: str = "cpu") -> None:
        self._config = config
        self._device = device
        self._source = Path(config.model.path)
        self._objective: Objective = _implementation(OBJECTIVE)(config)
        model = load_model(self._source, device=device)
        if config.learner.gradient_checkpointing:
            recompute_activations(model)
        dtype = compute_dtype(config.model.dtype, device)
        self._policy = Policy(model, temperature=config.sampling.temperature, dtype=dtype)
        self._reference: Policy | None = None
        if self._objective.needs_reference:
            frozen = copy.deepcopy(model).requires_grad_(False)
            self._reference = Policy(frozen, temperature=config.sampling.temperature, dtype=dtype)
        self._backend: Backend = _implementation(BACKENDS[_kind(config.backend)])(
            model.parameters(), learner=config.learner
        )
        self._steps = 0

    def step(self, batch: Batch) -> dict[str, float]:
        """One optimizer step; see metrics.py for what comes back. Raises DivergedError, AlignmentError."""
        began = time.perf_counter()
        lr = learning_rate(self._config.learner, step=self._steps, steps=self._config.run.steps)
        out = self._update(batch, lr) if batch.rows else metrics.nothing_trained()
        self._steps += 1
        return out | {"train/lr": lr, "learner/busy_s": time.perf_counter() - began}

    def tensors(self) -> Mapping[str, Tensor]:
        """Every parameter and persistent buffer by state-dict name, tied aliases included; not copies."""
        return self._policy.model.state_dict()

    def save(self, path: Path) -> None:
        """Write model, optimizer, step count and RNG into an existing empty directory. Raises CheckpointError."""
        state = {"optimizer": self._backend.state(), "steps": self._steps}
        checkpoint.write(path, model=self._policy.model, source=self._source, state=state)

    def load(self, path: Path) -> None:
        """Restore what ``save`` wrote; the reference stays the initial model. Raises CheckpointError; then nothing changed."""
        weights, state = checkpoint.read(path, device=self._device)
        try:
            steps, optimizer = int(state["steps"]), state["optimizer"]
            checkpoint.check(self._policy.model, weights, path)
            self._backend.restore(optimizer)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint {path} does not fit this run: {error}") from error
        checkpoint.assign(self._policy.model, weights)
        checkpoint.restore_rng(state)
        self._steps = steps

    def _update(self, batch: Batch, lr: float) -> dict[str, float]:
        weights_R = self._objective.row_weights(batch)
        budget = self._config.learner.micro_batch_tokens
        packs = plan(batch.rows, weights_R=weights_R, version=batch.version, budget=budget)
        try:
            total, distinct, trace = self._gradient(packs)
            norm = self._backend.norm()
            if not math.isfinite(norm):
                raise DivergedError(f"gradient norm is {norm} at step {batch.step}, version {batch.version}")
        except BaseException:
            self._backend.discard()
            raise
        self._backend.step(lr=lr, norm=norm, max_norm=self._config.learner.max_grad_norm)
        return metrics.of_tokens(trace) | {
            "train/loss": total,
            "train/grad_norm": norm,
            "train/distinct_tokens": float(distinct),
            "train/padded_tokens": float(padded_tokens(batch.rows)),
        }

    def _gradient(self, packs: tuple[Pack, ...]) -> tuple[float, int, metrics.Trace]:
        """Accumulate the gradient of a whole step; returns its loss, positions forwarded, and the trace of its tokens."""
        total, distinct, traces = 0.0, 0, []
        with self._training():
            for pack in packs:
                loss, inputs, trace = self._micro_batch(pack)
                value = float(loss.total.detach())
                if not math.isfinite(value):
                    raise DivergedError(f"loss is {value} on {len(pack.targets_K)} tokens of {len(pack.contexts)} rows")
                self._backend.accumulate(loss.total)
                total += value
                distinct += inputs.tokens.size
                traces.append(trace)
        return total, distinct, metrics.join(traces)

    def _micro_batch(self, pack: Pack) -> tuple[Loss, Inputs, metrics.Trace]:
        out, inputs = self._policy.logprobs(pack)
        reference_K = self._reference_logprobs(pack)
        dtype, device = out.logprobs_K.dtype, out.logprobs_K.device
        loss = self._objective(
            out.logprobs_K,
            behaviour_K=torch.as_tensor(pack.behaviour_K, dtype=dtype, device=device),
            advantages_K=torch.as_tensor(pack.advantages_K, dtype=dtype, device=device),
            weights_K=torch.as_tensor(pack.weights_K, dtype=dtype, device=device),
            reference_K=reference_K,
        )
        trace = metrics.Trace(
            logprobs_K=_numpy(out.logprobs_K),
            behaviour_K=pack.behaviour_K.astype(np.float64),
            reference_K=None if reference_K is None else _numpy(reference_K),
            entropy_K=_numpy(out.entropy_M)[inputs.slot_K],
            lags_K=pack.lags_K,
            low_K=loss.low_K.cpu().numpy(),
            high_K=loss.high_K.cpu().numpy(),
            cut_K=loss.cut_K.cpu().numpy(),
        )
        return loss, inputs, trace

    def _reference_logprobs(self, pack: Pack) -> Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return self._reference.logprobs(pack)[0].logprobs_K

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Hugging Face recomputes activations only in training mode; dropout is off in either mode."""
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


def _implementation(path: str) -> Any:
    """The object at "module:name". Stages know one another's Protocols alone; this is where their implementations meet."""
    module, name = path.split(":")
    return getattr(import_module(module), name)
