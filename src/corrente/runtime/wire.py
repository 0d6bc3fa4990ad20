"""The messages between a controller and its engines, learners and teachers; common/rpc.py lays them on a stream.

Every message is a typed struct. Its docstring says what it is answered with; without a word of that, with None.
"""

from __future__ import annotations

import msgspec

from corrente.common.rpc import CancelCall
from corrente.config import RunConfig
from corrente.data.types import ApplyMode, Batch, Request, Tokens
from corrente.sync.base import OfferRequest, Update
from corrente.sync.layout import Layout
from corrente.sync.offers import Offer


class _Message(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag=True):
    pass


class Start(_Message, frozen=True, kw_only=True):
    """Build the core: ``factory`` ("module:function") is called with ``config``, and that of an engine with its ``index``, its
    turn where there are several GPUs, too. An engine answers with its Layout."""

    factory: str
    config: RunConfig
    index: int = 0


class Attach(_Message, frozen=True, kw_only=True):
    """Make ready ``slots`` weight buffers for ``layout``: those in the memory inherited as ``fd`` or to be opened at ``path``, or
    buffers of the worker's own where neither is given."""

    layout: Layout
    fd: int | None = None
    path: str = ""
    slots: int = 2


class Generate(_Message, frozen=True, kw_only=True):
    """Answered with a Completion."""

    request: Request


class Score(_Message, frozen=True, kw_only=True):
    """Answered with Scores."""

    tokens: Tokens
    top: int = 0


class Abort(_Message, frozen=True, kw_only=True):
    """End requests by their own ids; their Generate calls are answered with what they have."""

    ids: tuple[str, ...]


class Partials(_Message, frozen=True, kw_only=True):
    """Answered with what the live ones among these requests have so far, by id."""

    ids: tuple[str, ...]


class Reserve(_Message, frozen=True, kw_only=True):
    """Answered once no live sequence samples from the slot."""

    slot: int


class Receive(_Message, frozen=True, kw_only=True):
    """Answered when what is offered lies in its slot. Decoding goes on meanwhile."""

    offer: Offer


class Apply(_Message, frozen=True, kw_only=True):
    """Flip the engine to a staged update; answered with the pause in seconds."""

    update: Update
    mode: ApplyMode


class Stats(_Message, frozen=True, kw_only=True):
    """Answered with EngineStats."""


class StepRpc(_Message, frozen=True, kw_only=True):
    """One optimizer step; answered with metrics."""

    batch: Batch


class Export(_Message, frozen=True, kw_only=True):
    """Copy the present weights into a slot; answered with the seconds that took."""

    version: int
    slot: int


class OfferWeights(_Message, frozen=True, kw_only=True):
    """Offer a version that was exported; answered with an Offer, beside the step that may be going on."""

    request: OfferRequest


class Save(_Message, frozen=True, kw_only=True):
    path: str


class Load(_Message, frozen=True, kw_only=True):
    path: str


class Leave(_Message, frozen=True, kw_only=True):
    """An engine that joined wants to leave. It queues this for itself, and tells the controller in an answer to call 0."""


class Dismiss(_Message, frozen=True, kw_only=True):
    """An engine that joined does not fit: it prints ``why`` and ends. Has no answer."""

    why: str


Asked = Start | Attach | Generate | Score | Abort | Partials | Stats | Reserve | Receive | Apply
Body = Asked | StepRpc | Export | OfferWeights | Save | Load | CancelCall | Leave | Dismiss
