"""The random state of this process that user code may draw from, as plain data: Python's ``random`` and NumPy's global generator.

Nothing of ours draws from them; a reward function or an environment of yours may. torch's is the learner's to keep.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np


def state() -> dict[str, Any]:
    """Numbers, texts and lists of them."""
    version, numbers, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    inner = numpy["state"]
    return {
        "python": [version, list(numbers), gauss],
        "numpy": {**numpy, "state": {"key": inner["key"].tolist(), "pos": int(inner["pos"])}},
    }


def restore(kept: Mapping[str, Any]) -> None:
    """Go on where ``state`` was called; nothing where there is nothing to restore."""
    if not kept:
        return
    version, numbers, gauss = kept["python"]
    random.setstate((version, tuple(numbers), gauss))
    inner = kept["numpy"]["state"]
    np.random.set_state({**kept["numpy"], "state": {**inner, "key": np.array(inner["key"], np.uint32)}})
