"""Save and restore the global random state that user code may draw from: Python's ``random`` and NumPy's global generator.

corrente itself draws from neither; a reward function or an environment may. The learner saves torch's state.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np


def rng_state() -> dict[str, Any]:
    """The present state of both generators as plain data: numbers, texts and lists of them."""
    version, numbers, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    inner = numpy["state"]
    return {
        "python": [version, list(numbers), gauss],
        "numpy": {**numpy, "state": {"key": inner["key"].tolist(), "pos": int(inner["pos"])}},
    }


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Set both generators to a state that ``rng_state`` returned; an empty one changes nothing."""
    if not state:
        return
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    inner = state["numpy"]["state"]
    np.random.set_state({**state["numpy"], "state": {**inner, "key": np.array(inner["key"], np.uint32)}})
