"""Weights between two processes on one GPU, by the handle of the learner's memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from corrente import config as c
from corrente.sync import outbox
from corrente.sync.base import Order
from corrente.sync.layout import Slab, arrange

pytestmark = pytest.mark.gpu

LAYOUT = arrange([Slab(name="w", shape=(1000, 7), dtype="float32", offset=0, sources=("w",))])
ENGINE = """
import sys, msgspec, torch
from corrente.sync.base import Offer
from corrente.sync.inbox import Inbox
from corrente.sync.layout import Layout
layout = msgspec.json.decode(sys.argv[1], type=Layout)
offer = msgspec.json.decode(sys.argv[2], type=Offer)
inbox = Inbox(layout, [torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)])
inbox.receive(offer)
print(inbox.slots[offer.slot].view(torch.float32).sum().item())
"""


def test_engine_process_copies_what_the_learner_process_packed(tmp_path: Path):
    box = outbox.build(c.RunConfig(sync=c.CudaIpc(), run=c.Run(dir=str(tmp_path))), LAYOUT)
    weights = torch.arange(7000, dtype=torch.float32).view(1000, 7)
    offer = box.export(Order(version=0, slot=1), {"w": weights}).offer
    arguments = [msgspec.json.encode(value).decode() for value in (LAYOUT, offer)]
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(float(weights.sum()))
    box.close()
