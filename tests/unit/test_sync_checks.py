"""Transports that cannot work where they are asked for are refused, in one line."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
import torch
from tests.refusals import refusal

from corrente import config as c
from corrente.common.imports import load_object
from corrente.config import schema
from corrente.config.rewards import SelfTeacherScorer
from corrente.config.sync import SYNC_OF_RUNTIME
from corrente.errors import ConfigError
from corrente.sync.checks import check
from corrente.sync.kinds import KINDS, transport_of_offer
from corrente.sync.offers import Offer, SharedOffer

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_table_knows_every_transport():
    sections = (c.Inproc, c.Shm, c.Disk, c.Http, c.Collective, c.VllmNccl, c.CudaIpc)
    assert {transport.section for transport in KINDS.values()} == set(sections)
    assert set(KINDS) == {schema.kind_of(section) for section in sections}


def test_default_transport_of_every_runtime_goes_with_it():
    assert set(SYNC_OF_RUNTIME) == {runtime for transport in KINDS.values() for runtime in transport.runtimes}
    assert all(runtime in KINDS[kind].runtimes for runtime, kind in SYNC_OF_RUNTIME.items())


def test_every_offer_is_fetched_by_a_transport_and_every_half_is_there():
    assert {transport.offer for transport in KINDS.values()} == set(get_args(Offer))
    offer = SharedOffer(version=0, slot=0, nbytes=0)
    assert transport_of_offer(offer).shares_memory
    for transport in KINDS.values():
        assert callable(load_object(transport.sender).offer)
        assert not transport.receiver or callable(load_object(transport.receiver).fetch)


@pytest.mark.parametrize("sync", [c.Shm(), c.Disk(payload="delta"), c.Http(), c.Http(host="::1"), c.Collective()])
def test_sync_checks_accepts(sync: Any):
    assert refusal(check, c.RunConfig(sync=sync)) == ""
    assert 'runtime.kind = "inline" needs' in refusal(check, c.RunConfig(runtime=c.Inline(), sync=sync))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            c.RunConfig(sync=c.Inproc()),
            'sync.kind = "inproc": runtime.kind = "procs" needs sync.kind = "shm" or "disk"',
        ),
        (c.RunConfig(runtime=c.Inline()), 'sync.kind = "shm": runtime.kind = "inline" needs sync.kind = "inproc"'),
        (c.RunConfig(sync=c.Http(host="0.0.0.0")), "sync.host = '0.0.0.0': give the one address"),
        (c.RunConfig(sync=c.Collective(host="")), "sync.host = '': give the one address"),
        pytest.param(c.RunConfig(sync=c.CudaIpc()), 'sync.kind = "cuda_ipc" needs a GPU', marks=NO_GPU),
        (
            c.RunConfig(sync=c.VllmNccl()),
            'sync.kind = "vllm_nccl": engine.kind = "embedded" cannot receive by it; it needs engine.kind = "vllm"',
        ),
        (c.RunConfig(sync=c.VllmNccl(), engine=c.Vllm(), adapters=c.Lora()), "ships whole checkpoints"),
        pytest.param(c.RunConfig(sync=c.VllmNccl(), engine=c.Vllm()), '"vllm_nccl" needs a GPU', marks=NO_GPU),
        (
            c.RunConfig(sync=c.Collective(), reward=c.Reward(scorers=(SelfTeacherScorer(),))),
            'reward.scorers[0].kind = "self_teacher": it is brought each version after the engines have it, and sync.kind = '
            '"collective"; it must be one of inproc, shm, disk, http',
        ),
        pytest.param(
            c.RunConfig(sync=c.Collective(backend="nccl")), 'sync.backend = "nccl" needs 2 GPUs', marks=NO_GPU
        ),
    ],
)
def test_transport_that_cannot_work_is_refused(config: c.RunConfig, message: str):
    with pytest.raises(ConfigError) as refusal:
        check(config)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_http_without_its_extra_is_refused_with_the_command_that_adds_it(monkeypatch: pytest.MonkeyPatch):
    lacking = msgspec.structs.replace(KINDS["http"], packages=("uvicorn", "no_such_package"))
    monkeypatch.setattr("corrente.sync.checks.transport_of", lambda section: lacking)
    with pytest.raises(ConfigError, match=r'needs no_such_package: pip install "corrente\[http\]"'):
        check(c.RunConfig(sync=c.Http()))
