"""What others build on, pinned: a name that appears or goes is a decision, and a line in the changelog."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from corrente import errors

PUBLIC = {
    "data.types": "Batch Completion Episode Group Prompt Request Row Sampling Scores Span StepScore TeacherLogprobs Turn "
    "concat_tokens",
    "controller.parts": "Checkpoints Parts RunResult",
    "controller.plan": "Plan",
    "controller.snapshot": "Snapshot Unfinished",
    "controller.pipeline": "Pipeline run",
    "entrypoints.assemble": "build_buffer build_inflight build_staleness derive_plan eval_sampling open_parts",
    "entrypoints.train": "run_training",
    "entrypoints.evaluate": "config_of_checkpoint config_of_model run_evaluation",
    "entrypoints.inputs": "RunInputs",
    "entrypoints.export": "card push stage upload",
    "config": "Alarm Algo Arithmetic ArithmeticSource Barrier Cancel Chat Checkpoint Collective CudaIpc Dataset Disk Distill "
    "Double Drain Embedded Environments Eval Filter Full FunctionScorer GivenRows Http Inline Inproc Jsonl "
    "JsonlSource JudgeScorer LearnerConfig Limits Lora LoraMerged Mixture Model ModelScorer NoBuffer Observe Parquet "
    "ParquetSource Pool ProcessRewardScorer ProcessScorer Procs ReasoningGym Recompute Resume Reward "
    "RewardModelScorer EnvRules Run RunConfig Sampling ScorerConfig Seeds SelfTeacherScorer ServedTeacherScorer Shm "
    "Single SingleTurn OldWeights Staleness Stream Swap TeacherScorer Teaching Tools Vllm VllmNccl Window "
    "temperature_of",
    "env.environment": "Environment Observation",
    "trl": "AsyncGRPOConfig AsyncGRPOTrainer GRPOConfig GRPOTrainer",
    "testing": "ContractError EngineCase LearnerCase Simulation SyncCase World check_buffer check_engine check_env "
    "check_inflight check_learner check_prompts check_scorer check_sink check_staleness check_sync run_virtual samples simulate",
}
PROTOCOLS = {
    "prompts.base:Prompts": "describe find next restore state",
    "prompts.base:ChatEncoder": "encode prompt render",
    "engine.base:Engine": "abort generate partials score stats",
    "env.base:Env": "play",
    "env.environment:Environment": "close reset step",
    "score.base:Scorer": "score stats",
    "score.base:Source": "name score_episodes single wait_until_ready",
    "algo.base:Algorithm": "batch trainable",
    "learner.base:Learner": "load progress save step",
    "observe.base:Sink": "close event metrics sample span",
    "runtime.base:Runtime": "open",
    "engine.launcher:Launcher": "launch replicas",
    "engine.launcher:SharedWeights": "fd fit path",
    "buffer.base:Buffer": "close drop occupancy put release reserve take",
    "sync.base:Sync": "catch_up deliver export flip stats",
    "sync.base:Receiver": "apply members receive reserve",
    "sync.base:Sender": "export offer",
    "staleness.base:StalenessPolicy": "judge",
    "inflight.base:InflightPolicy": "land one_version",
    "inflight.base:Traffic": "give_up interrupted quiet_groups quiet_requests",
    "adapters.base:Adapters": "assign frozen read tensors write",
    "algo.base:Objective": "row_weights survey",
    "backends.base:Backend": "accumulate discard micro_batch optimizer prepare",
    "backends.base:StepOptimizer": "norm restore state step",
    "data.step_totals:StepTotals": "all concat merge sum",
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
