"""Every knob, its default and what it may be: one frozen section per axis or stage, tagged by ``kind``. Imports no torch.

One file per axis or stage, under the name of its folder; ``run`` puts them together. A config says intent; what follows from it
(slots, bounds, denominators) is derived in code and never written back. ``load`` reads TOML and overrides, and refuses unknown
keys with the nearest valid name. ``entrypoints.checks`` refuses combinations that cannot work, before a model is loaded.
"""

from __future__ import annotations

from corrente.config.adapters import (
    Full,
    Lora,
    LoraMerged,
)
from corrente.config.algorithm import (
    Algo,
    Distill,
)
from corrente.config.buffer import (
    Double,
    NoBuffer,
    Stream,
    Window,
)
from corrente.config.engine import (
    Embedded,
    Model,
    Pool,
    Vllm,
)
from corrente.config.env import (
    Environments,
    EnvRules,
    SingleTurn,
    Tools,
)
from corrente.config.inflight import (
    Barrier,
    Cancel,
    Drain,
    OldWeights,
    Recompute,
    Resume,
    Swap,
)
from corrente.config.learner import (
    LearnerConfig,
    Single,
)
from corrente.config.observe import (
    Alarm,
    Observe,
)
from corrente.config.prompts import (
    Arithmetic,
    ArithmeticSource,
    Chat,
    Dataset,
    GivenRows,
    Jsonl,
    JsonlSource,
    Mixture,
    Parquet,
    ParquetSource,
    ReasoningGym,
    Seeds,
)
from corrente.config.rewards import (
    FunctionScorer,
    JudgeScorer,
    ModelScorer,
    ProcessRewardScorer,
    ProcessScorer,
    Reward,
    RewardModelScorer,
    ScorerConfig,
    SelfTeacherScorer,
    ServedTeacherScorer,
    TeacherScorer,
    Teaching,
    temperature_of,
)
from corrente.config.run import (
    Checkpoint,
    Eval,
    Filter,
    Limits,
    Run,
    RunConfig,
)
from corrente.config.runtime import (
    Inline,
    Procs,
)
from corrente.config.staleness import (
    Staleness,
)
from corrente.config.sync import (
    Collective,
    CudaIpc,
    Disk,
    Http,
    Inproc,
    Shm,
    VllmNccl,
)
from corrente.data.types import Sampling

__all__ = [
    "Alarm",
    "Algo",
    "Arithmetic",
    "ArithmeticSource",
    "Barrier",
    "Cancel",
    "Chat",
    "Checkpoint",
    "Collective",
    "CudaIpc",
    "Dataset",
    "Disk",
    "Distill",
    "Double",
    "Drain",
    "Embedded",
    "EnvRules",
    "Environments",
    "Eval",
    "Filter",
    "Full",
    "FunctionScorer",
    "GivenRows",
    "Http",
    "Inline",
    "Inproc",
    "Jsonl",
    "JsonlSource",
    "JudgeScorer",
    "LearnerConfig",
    "Limits",
    "Lora",
    "LoraMerged",
    "Mixture",
    "Model",
    "ModelScorer",
    "NoBuffer",
    "Observe",
    "OldWeights",
    "Parquet",
    "ParquetSource",
    "Pool",
    "ProcessRewardScorer",
    "ProcessScorer",
    "Procs",
    "ReasoningGym",
    "Recompute",
    "Resume",
    "Reward",
    "RewardModelScorer",
    "Run",
    "RunConfig",
    "Sampling",
    "ScorerConfig",
    "Seeds",
    "SelfTeacherScorer",
    "ServedTeacherScorer",
    "Shm",
    "Single",
    "SingleTurn",
    "Staleness",
    "Stream",
    "Swap",
    "TeacherScorer",
    "Teaching",
    "Tools",
    "Vllm",
    "VllmNccl",
    "Window",
    "temperature_of",
]
