"""Runtimes decide which process everything runs in. Whichever is chosen, the pipeline sees the same handles (base.Workers).

``inline``  everything in this process, nothing overlaps. For debugging, for tests, and as the synchronous baseline that an
            asynchronous run is compared with.
``procs``   a controller here, engine and learner in child processes of one host. The default: both sides work at the same
            time, a crash of either is a clear error, and weights cross without a copy on the engine's side.
"""

from __future__ import annotations

from collections.abc import Mapping

from corrente.config import Inline, Procs

KINDS: Mapping[type, str] = {
    Inline: "corrente.runtime.inline:InlineRuntime",
    Procs: "corrente.runtime.procs:ProcsRuntime",
}
"""Section of the config -> dotted path of the runtime, which is built with the dotted paths of its cores (runtime/cores.py)."""
