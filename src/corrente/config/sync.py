"""How weights reach the engines: the kinds of ``[sync]`` in a config. Their code is in sync/."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from corrente.config.section import Kind, Natural, Positive, Seconds


class _Sync(Kind, frozen=True, kw_only=True):
    every: Positive = 1
    """Optimizer steps per published version."""
    retries: Natural = 3
    """Attempts after a failed export, delivery or flip before the run ends."""
    deadline_s: Seconds = 300.0
    """Of one export, or of one delivery; past it that has failed and is tried again."""


class _Moved(_Sync, frozen=True, kw_only=True):
    payload: Literal["full", "delta"] = "full"
    """full: every weight. delta: what changed since the version the engines hold, bit for bit."""
    anchor_every: Positive = 20
    """With payload delta: versions between two that are shipped in full."""


class Inproc(_Sync, frozen=True, kw_only=True, tag="inproc"):
    """Two weight buffers in this process."""


class Shm(_Sync, frozen=True, kw_only=True, tag="shm"):
    """Two weight buffers in memory shared by learner and engine: a flip copies nothing."""


class Disk(_Moved, frozen=True, kw_only=True, tag="disk"):
    """Through a folder that both sides see: safetensors, written aside, with a commit marker."""

    path: str = ""
    """The folder; empty: "weights" in the run folder."""
    keep: Annotated[int, Meta(ge=2)] = 2
    """Versions kept; the engines may still read the last but one."""


class Http(_Moved, frozen=True, kw_only=True, tag="http"):
    """Engines fetch from a server in the learner: streamed, checksummed, behind a token."""

    host: str = "127.0.0.1"
    """Address the learner listens on, and where engines find it; loopback unless told otherwise."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """0: any that is free."""


class Collective(_Sync, frozen=True, kw_only=True, tag="collective"):
    """A torch.distributed broadcast in packed buckets: gloo between CPUs, NCCL between GPUs."""

    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo: through host memory, everywhere. nccl: between GPUs, where learner and engines keep their weights on one."""
    bucket_mb: Positive = 64
    """MiB broadcast at once; two buckets are in flight."""
    host: str = "127.0.0.1"
    """Address of the learner where engines meet it."""


class VllmNccl(_Sync, frozen=True, kw_only=True, tag="vllm_nccl"):
    """vLLM's own NCCL engine, packed: its code receives, and requests wait while the weights cross."""

    bucket_mb: Positive = 1024
    """MiB packed into one broadcast; two are in flight."""
    host: str = "127.0.0.1"
    """Address of the learner where servers meet it."""


class CudaIpc(_Sync, frozen=True, kw_only=True, tag="cuda_ipc"):
    """Learner and engine on GPUs of one host: the engine maps the learner's device memory."""


SYNC_OF_RUNTIME = {"inline": "inproc", "procs": "shm"}
"""The weight transport of each runtime where none is given."""
