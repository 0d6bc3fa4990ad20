"""What others build on, pinned: a name that appears or goes is a decision, and a line in the changelog."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from corrente import errors

PUBLIC = {
    "types": "Batch Completion Episode Group Prompt Request Row Sampling Span Turn concat_tokens",
    "parts": "Checkpoints Outcome Parts Plan Snapshot Unfinished",
    "pipeline": "Pipeline run",
    "assemble": "build_buffer build_inflight build_staleness main open_parts plan run_folder",
    "config": "Algo Arithmetic Barrier Checkpoint Double Drain Embedded Eval Filter Full Inline Inproc Jsonl Learner Limits "
    "Model NoBuffer Observe Procs Recompute Reward Run RunConfig Shm Single Staleness Stream Swap Window",
    "testing": "ContractError EngineCase LearnerCase Simulation SyncCase World check_buffer check_engine check_env "
    "check_inflight check_learner check_prompts check_scorer check_sink check_staleness check_sync run_virtual simulate",
}
PROTOCOLS = {
    "prompts.base:Prompts": "describe find next restore state",
    "engine.base:Engine": "abort apply generate score stats",
    "env.base:Env": "play",
    "score.base:Scorer": "score",
    "algo.base:Algorithm": "batch trainable",
    "learner.base:Learner": "load save step",
    "observe.base:Sink": "close event metrics sample span",
    "runtime.base:Runtime": "open",
    "buffer.base:Buffer": "close drop occupancy put release reserve take",
    "sync.base:Sync": "flip stage stats",
    "staleness.base:StalenessPolicy": "judge",
    "inflight.base:InflightPolicy": "land",
    "inflight.base:Traffic": "quiet_groups quiet_requests",
}


def _public(module: str) -> list[str]:
    """``__all__``, or the classes and functions a module defines under a public name."""
    found = importlib.import_module(f"corrente.{module}")
    own = [
        name
        for name, value in vars(found).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == found.__name__
    ]
    return sorted(getattr(found, "__all__", own))


@pytest.mark.parametrize("module", PUBLIC)
def test_module_offers_exactly_its_pinned_names(module: str):
    assert _public(module) == sorted(PUBLIC[module].split())


@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocol_has_exactly_its_pinned_methods(name: str):
    module, _, protocol = name.partition(":")
    methods = vars(getattr(importlib.import_module(f"corrente.{module}"), protocol))
    assert sorted(m for m in methods if not m.startswith("_")) == sorted(PROTOCOLS[name].split())


def test_error_tree_is_drawn_as_it_is():
    """The tree in the docstring of errors.py names every class once, with its parents, under the class it descends from."""
    drawn = re.findall(r"^([│ ]*[├└─ ]*)(\w+)(?:\((\w+)\))?", errors.__doc__ or "", re.MULTILINE)
    tree = [(len(indent) // 4, name, also) for indent, name, also in drawn if hasattr(errors, name)]
    assert sorted(name for _, name, _ in tree) == sorted(
        n for n in _public("errors") if inspect.isclass(getattr(errors, n))
    )
    above: list[str] = []
    for depth, name, also in tree:
        bases = {base.__name__ for base in getattr(errors, name).__bases__}
        assert bases == {above[depth - 1] if depth else "Exception"} | ({also} if also else set()), name
        above = [*above[:depth], name]
