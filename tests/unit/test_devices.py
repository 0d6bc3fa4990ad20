"""A model is put on a GPU where there is one: who gets which, and what is refused where there is none. None is needed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import refusal

from corrente import config as c
from corrente.config.load import parse_config
from corrente.entrypoints.checks import check_config
from corrente.errors import ConfigError
from corrente.models import devices
from corrente.runtime import cores
from corrente.sync import checks as sync_checks
from corrente.sync import sender
from corrente.sync.lagged_receiver import LaggedReceiver
from corrente.sync.layout import Slab, arrange
from corrente.sync.weight_slots import allocate_slots

LAYOUT = arrange([Slab(name="w", shape=(3,), dtype="float32", offset=0, sources=("w",))])


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has torch find so many GPUs."""

    def found(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return found


@pytest.mark.parametrize(
    ("count", "learner", "engines"),
    [
        (0, "cpu", ["cpu", "cpu", "cpu"]),
        (1, "cuda:0", ["cuda:0", "cuda:0", "cuda:0"]),
        (2, "cuda:1", ["cuda:0", "cuda:0", "cuda:0"]),
        (3, "cuda:2", ["cuda:0", "cuda:1", "cuda:0"]),
        (4, "cuda:3", ["cuda:0", "cuda:1", "cuda:2"]),
    ],
)
def test_learner_has_the_last_gpu_and_engines_take_turns_at_the_others(
    gpus: Any, count: int, learner: str, engines: list[str]
):
    gpus(count)
    assert devices.learner_device("auto") == learner
    assert [devices.engine_device("auto", index) for index in range(3)] == engines
    assert devices.learner_device("cpu") == devices.engine_device("cpu", 1) == "cpu"
    if count:
        assert (devices.learner_device("cuda"), devices.engine_device("cuda")) == (learner, engines[0])


def test_cores_are_built_where_the_config_says(gpus: Any, monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}
    for module, name in (("corrente.engine.embedded.core", "EmbeddedCore"), ("corrente.learner.core", "TorchLearner")):
        monkeypatch.setattr(
            f"{module}.{name}", lambda *_, name=name, **settings: given.update({name: settings["device"]})
        )
    gpus(3)
    for wanted, expected in (("auto", ("cuda:1", "cuda:2")), ("cuda", ("cuda:1", "cuda:2")), ("cpu", ("cpu", "cpu"))):
        config = c.RunConfig(model=c.Model(path="somewhere", device=wanted))  # pyright: ignore
        cores.engine(config, 1)
        cores.learner(config)
        assert (given["EmbeddedCore"], given["TorchLearner"]) == expected


def test_gpu_that_is_not_there_is_refused_before_a_model_is_loaded(gpus: Any, tmp_path: Path):
    gpus(0)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    config = parse_config({"model": {"path": str(tmp_path), "device": "cuda"}})
    for refuses in (check_config, cores.engine, cores.learner):
        with pytest.raises(
            ConfigError, match=r'model\.device = "cuda" needs a GPU, and torch finds none on this machine'
        ):
            refuses(config)


@pytest.mark.parametrize(
    ("count", "config", "message"),
    [
        (
            2,
            c.RunConfig(sync=c.Collective(backend="nccl"), pool=c.Pool(replicas=2)),
            'sync.backend = "nccl" needs 3 GPUs, one for each engine and one for the learner, and torch finds 2',
        ),
        (
            1,
            c.RunConfig(sync=c.CudaIpc(), model=c.Model(device="cpu")),
            'model.device = "cpu" must be "auto" or "cuda"',
        ),
        (3, c.RunConfig(sync=c.Collective(backend="nccl"), pool=c.Pool(replicas=2)), ""),
        (1, c.RunConfig(sync=c.CudaIpc(), pool=c.Pool(replicas=2)), ""),
        (1, c.RunConfig(sync=c.Collective(backend="nccl"), engine=c.Vllm(), pool=c.Pool(replicas=2)), ""),
    ],
)
def test_transport_between_gpus_needs_them(gpus: Any, count: int, config: c.RunConfig, message: str):
    gpus(count)
    refused = refusal(sync_checks.check, config)
    assert message in refused if message else refused == ""


def test_slots_lie_where_they_are_used(gpus: Any, tmp_path: Path):
    """torch's own stand-in for a device without memory takes the place of a GPU."""
    gpus(1)
    config = c.RunConfig(sync=c.CudaIpc(), run=c.Run(dir=str(tmp_path)))
    box = sender.build(config, LAYOUT, device="meta")
    assert {slot.device.type for slot in box.slots} == {"meta"}
    host = sender.build(c.RunConfig(run=c.Run(dir=str(tmp_path)), sync=c.Disk()), LAYOUT, device="meta")
    assert {slot.device.type for slot in host.slots} == {"cpu"}
    assert {slot.device.type for slot in allocate_slots(LAYOUT, device="meta")} == {"meta"}
    assert {slot.device.type for slot in LaggedReceiver(LAYOUT, lag=1, device="meta").slots} == {"meta"}
