"""Whole runs with teachers: another model, several by prompt, and the policy of some versions ago; real engines, tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch
from tests.e2e.test_runs import Record
from tests.e2e.tiny import tiny_config, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from corrente.config import schema
from corrente.controller import pipeline
from corrente.controller.parts import Parts, RunResult
from corrente.data.types import Group
from corrente.entrypoints.assemble import open_parts
from corrente.entrypoints.checks import check_config
from corrente.errors import ConfigError, root_cause
from corrente.score.base import Scorer

pytestmark = pytest.mark.slow

OWN = {"kind": "self_teacher", "top": 8}


class Watching:
    """A Scorer around another that keeps what it scored."""

    def __init__(self, inner: Scorer) -> None:
        self._inner = inner
        self.groups: list[Group] = []

    async def score(self, group: Group) -> Group:
        after = await self._inner.score(group)
        self.groups += [after] if after.id >= 0 else []
        return after

    def stats(self) -> Any:
        return self._inner.stats()


class Keeping:
    """A Sync around another that keeps the learner's weights, which ``tensors`` gives, as they were when exported."""

    def __init__(self, inner: Any, tensors: Any) -> None:
        self._inner, self._tensors = inner, tensors
        self.kept: dict[int, dict[str, torch.Tensor]] = {}

    async def export(self, version: int) -> None:
        self.kept[version] = {name: tensor.clone() for name, tensor in self._tensors().items()}
        await self._inner.export(version)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def play(tmp_path: Path, *overrides: str, keep: bool = False) -> tuple[RunResult, Record, Watching, Keeping | None]:
    config = tiny_config(tmp_path, "observe.samples=8", "eval.every=0", *overrides)
    check_config(config)
    record = Record()

    async def go() -> tuple[RunResult, Watching, Keeping | None]:
        async with open_parts(config, sinks=[record]) as parts:
            watching = Watching(parts.scorer)
            changes: dict[str, Any] = {"scorer": watching}
            keeping = None
            if keep:
                keeping = Keeping(parts.sync, parts.learner.core.tensors)  # type: ignore[attr-defined]
                changes["sync"] = keeping
            changed: Parts = msgspec.structs.replace(parts, **changes)
            return await pipeline.run(changed), watching, keeping

    try:
        outcome, watching, keeping = anyio.run(go)
    except BaseExceptionGroup as group:
        raise root_cause(group) from group
    return outcome, record, watching, keeping


def scorers(*tables: dict[str, Any]) -> str:
    return f"reward.scorers=[{', '.join(map(schema.show, tables))}]"


def decided(folder: Path, *, seed: int) -> Path:
    """A model that prefers some tokens clearly, which a new one does not: its logits are ten times larger."""
    model = AutoModelForCausalLM.from_pretrained(write_model(folder, seed=seed))
    model.model.norm.weight.data *= 10
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("loss", ["advantage", "jsd"])
def test_policy_comes_nearer_to_its_teacher_without_a_reward(loss: str, tmp_path: Path):
    wise = decided(tmp_path / "wise", seed=5)
    teacher = {"kind": "teacher", "path": str(wise), "top": 8, "threads": 1}
    outcome, record, watching, _ = play(
        tmp_path, scorers(teacher), f"distill.loss={loss}", "run.steps=12", "learner.lr=0.01"
    )
    assert (outcome.ended, outcome.counts["filtered"]) == ("steps", 0)
    gap = [step["distill/reverse_kl_k3"] for step in record.steps]
    assert np.mean(gap[-3:]) < 0.7 * np.mean(gap[:3])
    assert all(step["distill/tokens"] == step["train/tokens"] for step in record.steps)
    assert {taught.version for g in watching.groups for e in g.episodes for taught in e.taught} == {None}


@pytest.mark.parametrize("loss", ["advantage", "k2", "k3", "jsd"])
def test_teacher_that_is_a_copy_of_the_student_teaches_nothing(loss: str, tmp_path: Path):
    """Through engine, teacher process and learner: what is left is rounding. At another temperature than 1."""
    tiny_config(tmp_path)
    teacher = {"kind": "teacher", "path": str(tmp_path / "model"), "top": 9, "threads": 1}
    _, record, _, _ = play(
        tmp_path, scorers(teacher), f"distill.loss={loss}", "run.steps=1", "sampling.temperature=0.8"
    )
    (step,) = record.steps
    assert step["distill/tokens"] > 0
    assert abs(step["distill/reverse_kl"]) < 1e-5
    assert abs(step["train/loss"]) < 1e-5
    assert step["train/grad_norm"] < 1e-3


def test_each_prompt_has_the_teacher_it_names(tmp_path: Path):
    tiny_config(tmp_path)
    for name, seed in (("one", 5), ("two", 6)):
        write_model(tmp_path / name, seed=seed)
    data = tmp_path / "prompts.jsonl"
    sources = [
        {"kind": "jsonl", "name": name, "path": str(data), "epochs": 0, "eval_path": ""} for name in ("left", "right")
    ]
    teachers = [
        {"kind": "teacher", "path": str(tmp_path / name), "where": {"source": source}, "top": top, "threads": 1}
        for name, source, top in (("one", "left", 3), ("two", "right", 5))
    ]
    outcome, _, watching, _ = play(
        tmp_path,
        "prompts.kind=mixture",
        f"prompts.sources=[{', '.join(map(schema.show, sources))}]",
        scorers(*teachers),
        "distill.loss=jsd",
    )
    assert outcome.ended == "steps"
    spoke = {(g.prompt.fields["source"], t.teacher) for g in watching.groups for e in g.episodes for t in e.taught}
    assert spoke == {("left", "one"), ("right", "two")}


def test_teacher_of_another_vocabulary_is_refused_before_training(tmp_path: Path):
    tiny_config(tmp_path)
    other = write_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["zz"])
    tokenizer.save_pretrained(other)
    teacher = {"kind": "teacher", "path": str(other), "threads": 1}
    with pytest.raises(ConfigError, match="does not read the policy's tokens: it has 1 tokens more"):
        play(tmp_path, scorers(teacher), "distill.loss=k2")


# ---- the policy of some versions ago -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [1, 2])
def test_own_past_says_what_the_version_it_names_says(lag: int, tmp_path: Path):
    """Every word of the teacher against the learner's weights of that version, by an unmodified model."""
    teacher = {**OWN, "lag": lag, "temperature": 0.7}
    outcome, record, watching, keeping = play(
        tmp_path, scorers(teacher), "distill.loss=jsd", 'reward.functions=["length_penalty"]', "run.steps=6", keep=True
    )
    assert (outcome.ended, outcome.counts["failed"]) == ("steps", 0)
    assert keeping is not None
    seen: set[int] = set()
    for group in watching.groups:
        for episode in group.episodes:
            (taught,) = episode.taught
            assert taught.version is not None
            assert taught.version <= max(0, max(episode.sampled_versions()) + 1 - lag)
            seen.add(taught.version)
            logprobs = plain(tmp_path / "model", keeping.kept[taught.version], episode.turns, temperature=0.7)
            np.testing.assert_allclose(taught.logprobs, logprobs, atol=1e-4)
    assert seen >= set(range(5 - lag))  # nothing is scored under the last version
    told = [step["logged/self_version"] for step in record.steps if "logged/self_version" in step]
    assert told[-1] <= 6 - lag  # a step before which nothing was scored does not say it


def plain(path: Path, weights: dict[str, torch.Tensor], turns: Any, *, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of the last turn's tokens under the model at ``path``, with ``weights`` in place of its own."""
    model = AutoModelForCausalLM.from_pretrained(path)
    model.load_state_dict(weights, strict=False)
    tokens = torch.from_numpy(np.concatenate([turn.tokens for turn in turns]).astype(np.int64))
    with torch.inference_mode():
        logprobs = (model(tokens[None]).logits[0, :-1].float() / temperature).log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None])[-len(turns[-1].tokens) :, 0].numpy()


@pytest.mark.parametrize("transport", ["shm", "disk", "http"])
def test_own_past_follows_in_a_process_of_its_own(transport: str, tmp_path: Path):
    overrides = ("runtime.kind=procs", "runtime.placement=shared", f"sync.kind={transport}", "run.steps=5")
    outcome, record, watching, _ = play(
        tmp_path, scorers(OWN), "distill.loss=k3", 'reward.functions=["length_penalty"]', *overrides
    )
    assert (outcome.ended, outcome.counts["failed"]) == ("steps", 0)
    spoken = [(e, taught) for g in watching.groups for e in g.episodes for taught in e.taught]
    versions = {taught.version for _, taught in spoken}
    assert {0, 1, 2, 3, 4} >= versions > {0}  # which ones depends on when groups are scored
    for episode, taught in [(e, taught) for e, taught in spoken if taught.version == 0][:8]:
        np.testing.assert_allclose(taught.logprobs, plain(tmp_path / "model", {}, episode.turns), atol=1e-4)
    assert record.steps[-1]["publish/follower_missed"] == 0
    assert not [line for line in record.events if "did not reach" in line]


def test_own_past_follows_adapters_alone(tmp_path: Path):
    lora = ("adapters.kind=lora", "adapters.rank=2", "learner.lr=0.05")
    outcome, _, watching, _ = play(tmp_path, scorers(OWN), "distill.loss=jsd", *lora)
    assert outcome.ended == "steps"
    assert {taught.version for g in watching.groups for e in g.episodes for taught in e.taught} > {0}
