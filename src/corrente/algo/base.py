"""The contracts of an algorithm: finished groups become training rows, and their log-probabilities a loss. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from corrente.data.step_totals import LOCAL_TOTALS, StepTotals
from corrente.data.types import Batch, Group

if TYPE_CHECKING:
    from torch import Tensor


class Algorithm(Protocol):
    """Contract: pure and torch-free.

    - ``trainable`` says whether a scored group carries a learning signal; a reason when not ("" when it does).
    - ``batch`` builds the rows of one step. ``oldest_trainable`` per group withholds tokens of older versions (None: all
      may be trained on). Advantages of a group use the rewards of all its surviving episodes.
    """

    def trainable(self, group: Group) -> str: ...

    def batch(
        self, groups: Sequence[Group], *, step: int, version: int, oldest_trainable: Sequence[int | None]
    ) -> Batch: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The loss of one micro-batch, and the tokens it treats in a special way.

    ``total``: scalar to differentiate. ``low_K``, ``high_K``, ``cut_K``: tokens whose gradient the objective cut or
    shrank because their ratio was too low, too high for a good token, or for any reason (the first two included).
    ``rejected_K``: tokens the corrections left out; they are among ``cut_K``. ``whole_K``: those of them left out because
    their sequence was.
    """

    total: Tensor
    low_K: Tensor
    high_K: Tensor
    cut_K: Tensor
    rejected_K: Tensor
    whole_K: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherBatch:
    """One teacher's log-probs at the K trained tokens of a micro-batch; see teacher_logprobs.py.

    ``weight_K`` is 0 where the teacher did not answer, and then the other values at that token have no effect. ``logprobs_K``: of
    the tokens that were sampled. ``top_KJ``: of the teacher's J likeliest tokens. ``student_KJ``: the policy's log-probs of
    those, differentiable; None where the objective does not ask for them.
    """

    weight_K: Tensor
    logprobs_K: Tensor
    top_KJ: Tensor
    student_KJ: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The K trained tokens of one micro-batch, flat, with all that the loss reads. All but ``logprobs_K`` are constants.

    ``row_K``: the row a token belongs to; rows are whole and their tokens stand together, in order. None: all are of one row.
    ``lags_K``: versions between the policy that sampled and the one the step starts from. None: 0.
    ``entropy_K``: of the current policy where the token was drawn; differentiable. ``teachers``: one entry per teacher.
    """

    logprobs_K: Tensor
    behaviour_K: Tensor
    advantages_K: Tensor
    weights_K: Tensor
    row_K: Tensor | None = None
    lags_K: Tensor | None = None
    entropy_K: Tensor | None = None
    reference_K: Tensor | None = None
    teachers: tuple[TeacherBatch, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Values an objective holds fixed over the updates from one batch, for the K tokens of one micro-batch.

    ``proximal_K``: log-probs of the policy before the first update. ``weight_K``: importance weight. ``kept_K``: tokens that
    no correction left out. ``over_K``: tokens whose importance was above their cap. ``whole_K``: tokens whose sequence was
    left out. ``chosen_K``: tokens whose entropy is among the highest. ``scale_K``: from the fixed to the effective denominator.
    ``bonus_K``: weight of a token's entropy in the mean that is rewarded.
    """

    proximal_K: Tensor
    weight_K: Tensor
    kept_K: Tensor
    over_K: Tensor
    whole_K: Tensor
    chosen_K: Tensor
    scale_K: Tensor
    bonus_K: Tensor


class Objective(Protocol):
    """The loss that the learner minimises.

    - ``row_weights`` gives, for the rows of an optimizer step, the factor of each row's token losses; it contains the step's one
      denominator, so that the losses of micro-batches simply add.
    - ``survey`` is called before the first of ``updates`` updates from a batch, iff ``needs_survey``, with all micro-batches
      forwarded without gradient; it fixes what depends on the step as a whole. One answer per micro-batch.
    - Both take the step's ``totals``: ``batch`` and ``parts`` may be one rank's share of the step, and every sum, count or
      quantile over the step goes through them.
    - Calling it gives the loss of one micro-batch. It is pure and differentiable in ``logprobs_K``, ``entropy_K`` and the
      ``student_KJ`` of ``teachers`` alone. ``part.reference_K`` is set iff ``needs_reference``, ``constants`` iff
      ``needs_survey``. ``trained``: trained tokens of the whole step; None: those of ``part`` are all.
    - ``needs_teachers``: the part of the rows' teacher log-probs that ``part.teachers`` must hold: none, those of the sampled
      tokens, or those of the teacher's likeliest tokens as well.
    """

    needs_reference: bool
    needs_survey: bool
    needs_teachers: Literal["", "sampled", "likeliest"]
    updates: int

    def row_weights(self, batch: Batch, *, totals: StepTotals = LOCAL_TOTALS) -> NDArray[np.float64]: ...

    def survey(self, parts: Sequence[Trained], *, totals: StepTotals = LOCAL_TOTALS) -> list[Constants]: ...

    def __call__(self, part: Trained, *, constants: Constants | None = None, trained: int | None = None) -> Loss: ...
