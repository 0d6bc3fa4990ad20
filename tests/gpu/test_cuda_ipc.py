"""Weights between two processes on one GPU, by the handle of the learner's memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from corrente import config as c
from corrente.sync import sender
from corrente.sync.base import OfferRequest
from corrente.sync.layout import Slab, arrange

pytestmark = pytest.mark.gpu

LAYOUT = arrange([Slab(name="w", shape=(1000, 7), dtype="float32", offset=0, sources=("w",))])
ENGINE = """
import sys, msgspec, torch
from corrente.sync.offers import Offer
from corrente.sync.receiver import WeightReceiver
from corrente.sync.weight_slots import allocate_slots
from corrente.sync.layout import Layout
layout = msgspec.json.decode(sys.argv[1], type=Layout)
offer = msgspec.json.decode(sys.argv[2], type=Offer)
receiver = WeightReceiver(layout, allocate_slots(layout, device="cuda"))
receiver.receive(offer)
print(receiver.slots[offer.slot].view(torch.float32).sum().item())
"""


def test_engine_process_copies_what_the_learner_process_packed(tmp_path: Path):
    box = sender.build(c.RunConfig(sync=c.CudaIpc(), run=c.Run(dir=str(tmp_path))), LAYOUT)
    weights = torch.arange(7000, dtype=torch.float32).view(1000, 7)
    box.export(0, {"w": weights}, slot=1)
    offer = box.offer(OfferRequest(version=0, slot=1))
    arguments = [msgspec.json.encode(value).decode() for value in (LAYOUT, offer)]
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(float(weights.sum()))
    box.close()
