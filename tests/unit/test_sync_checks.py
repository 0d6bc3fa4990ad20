"""Transports that cannot work where they are asked for are refused, in one line."""

from __future__ import annotations

import pytest
import torch

from corrente import config as c
from corrente.config import schema
from corrente.errors import ConfigError
from corrente.sync.checks import TRANSPORTS, check

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_table_knows_every_transport():
    sections = (c.Inproc, c.Shm, c.Disk, c.Http, c.Collective, c.VllmNccl, c.CudaIpc)
    kinds = {kind for allowed in TRANSPORTS.values() for kind in allowed}
    assert kinds == {schema.kind_of(section) for section in sections}


@pytest.mark.parametrize("sync", [c.Shm(), c.Disk(payload="delta"), c.Http(), c.Http(host="::1"), c.Collective()])
def test_transport_between_processes_is_accepted(sync: object):
    check(c.RunConfig(sync=sync))  # pyright: ignore


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
        (c.RunConfig(sync=c.VllmNccl()), 'sync.kind = "vllm_nccl" is a door of vLLM\'s: it needs engine.kind = "vllm"'),
        (c.RunConfig(sync=c.VllmNccl(), engine=c.Vllm(), adapters=c.Lora()), "ships whole checkpoints"),
        pytest.param(c.RunConfig(sync=c.VllmNccl(), engine=c.Vllm()), '"vllm_nccl" needs a GPU', marks=NO_GPU),
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
    monkeypatch.setattr("corrente.sync.checks.HTTP_NEEDS", ("uvicorn", "no_such_package"))
    with pytest.raises(ConfigError, match=r'needs no_such_package: pip install "corrente\[http\]"'):
        check(c.RunConfig(sync=c.Http()))
