"""Backends: the axis that decides how one optimizer step is executed.

single   one device, one process: AdamW over all parameters. Pick it when model, gradient and two moments fit on the device:
         16 bytes a parameter in float32.

base     the contracts of a backend and of its optimizer
optimizer  the optimizers that backends share
"""

from __future__ import annotations

from collections.abc import Mapping

KINDS: Mapping[str, str] = {"single": "corrente.backends.single:SingleDevice"}
"""``backend.kind`` -> the class that implements base.Backend."""
