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
    "entrypoints.assemble": "build_buffer build_inflight derive_plan eval_sampling open_parts",
    "entrypoints.train": "run_training train",
    "entrypoints.train_result": "TrainResult train_result",
    "entrypoints.evaluate": "config_beside_run evaluate evaluate_target run_evaluation",
    "entrypoints.eval_target": "EvalTarget add_to_record config_of_checkpoint config_of_model find_target hold_servers",
    "entrypoints.inputs": "RunInputs recorded_config",
    "entrypoints.blocking": "run_blocking",
    "controller.run_state": "RunState",
    "entrypoints.export": "model_card push_run upload_folder write_upload",
    "config": "AdvantageSection Alarm Algo Arithmetic ArithmeticSource Barrier BnpoObjective Cancel Chat Checkpoint "
    "CispoObjective ClippedObjective Collective CudaIpc DapoObjective Dataset Disk Distill Double DppoKlObjective "
    "DppoTvObjective Drain DrGrpoObjective DroObjective Embedded Environments EnvRules Eval Filter Full "
    "FunctionScorer GdpoAdvantage GivenRows GmpoObjective GrpoAdvantage GrpoObjective GspoObjective "
    "GspoTokenObjective Http Inline Inproc IpoObjective Jsonl JsonlSource JudgeScorer KimiK15Objective "
    "KimiK2Objective LearnerConfig Limits Lora LoraMerged LuspoObjective MaxrlAdvantage Mixture Model ModelScorer "
    "NoBuffer ObjectiveSection Observe OldWeights OpoAdvantage Parquet ParquetSource Pool ProcessRewardScorer "
    "ProcessScorer Procs ReasoningGym Recompute ReinforceObjective ReinforcePpAdvantage "
    "ReinforcePpBaselineAdvantage Resume Reward RewardModelScorer RlooAdvantage Run RunConfig Sampling "
    "SapoObjective ScorerConfig Seeds SelfTeacherScorer ServedTeacherScorer Shm Single SingleTurn Staleness "
    "Stream Swap TeacherScorer Teaching temperature_of Tools ToprObjective UserAdvantage UserFilter UserKind "
    "UserObjective VespoObjective Vllm VllmNccl Window",
    "env.environment": "Environment Observation",
    "trl": "AsyncGRPOConfig AsyncGRPOTrainer GRPOConfig GRPOTrainer",
    "testing": "ContractError EngineCase LearnerCase Simulation SpawnerCase SyncCase World check_buffer check_engine check_env "
    "check_estimator check_filter check_inflight check_learner check_objective check_prompts check_scorer check_sink "
    "check_spawner check_staleness check_sync run_virtual samples simulate",
}
PROTOCOLS = {
    "prompts.base:Prompts": "describe find_prompts next_prompt restore state",
    "prompts.base:ChatEncoder": "encode prompt render",
    "engine.base:Engine": "abort generate partial_completions score stats",
    "env.base:Env": "play",
    "env.environment:Environment": "close reset step",
    "score.base:Scorer": "score stats",
    "score.base:Source": "name score_episodes single wait_until_ready",
    "algo.base:Algorithm": "batch trainable",
    "learner.base:Learner": "load progress save step",
    "observe.base:Sink": "close log_event log_metrics log_sample log_span",
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
    "common.spawn:Spawner": "spawn",
    "common.spawn:Worker": "ended label output stop",
    "common.spawn:RpcCaller": "call",
    "common.rpc_server:Role": "busy close handle requests work",
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
