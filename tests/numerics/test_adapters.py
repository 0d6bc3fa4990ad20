"""What LoRA trains, ships and saves: gradients against plain peft, merged weights against peft's own, checkpoints peft loads."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tests.numerics.continued import check_continues, same, weights
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from corrente import config as c
from corrente.adapters import directory, injection
from corrente.algo.base import Trained
from corrente.algo.losses import PolicyObjective
from corrente.config import RunConfig
from corrente.data.types import Batch
from corrente.errors import CheckpointError, ConfigError, SyncError
from corrente.learner.core import TorchLearner
from corrente.learner.packing import plan_packs
from corrente.learner.policy import Policy

RANK, ALPHA = 3, 7.0
LORA = c.Lora(rank=RANK, alpha=ALPHA)
MERGED = c.LoraMerged(rank=RANK, alpha=ALPHA)
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def _config(path: Path, **sections: Any) -> RunConfig:
    return RunConfig(
        **({"model": c.Model(path=str(path)), "learner": c.LearnerConfig(lr=1e-2), "adapters": LORA} | sections)
    )


def _shake(parameters: dict[str, Any]) -> None:
    """B is 0 at first, and then nothing that depends on A can be wrong."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(parameters.items()):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def _plain_peft(model: Any, **options: Any) -> Any:
    """What a user of peft would write."""
    wanted = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", **({"target_modules": "all-linear"} | options)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, wanted)


@pytest.fixture
def moe_dir(tmp_path: Path) -> Path:
    torch.manual_seed(5)
    shape = Qwen3MoeConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "moe")
    return tmp_path / "moe"


# ---- what is trained ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_gradients_equal_those_of_plain_peft_on_padded_rows(name, build_model, build_batch):
    """Folded into a prefix tree and cut into micro-batches, in float64, against peft's own wrapper on one padded batch."""
    batch = build_batch(4, 3)
    objective = PolicyObjective(RunConfig())
    ours, theirs = build_model(name), _plain_peft(build_model(name))
    injection.inject_adapters(ours, LORA, source=Path("base"))
    _shake(injection.adapter_parameters(ours))
    own = {n.replace(".default", ""): p for n, p in theirs.named_parameters() if p.requires_grad}
    assert own.keys() == injection.adapter_parameters(ours).keys()
    _shake(own)
    _backward(objective, batch, lambda: _padded_logprobs(theirs, batch))
    policy, packs = Policy(ours), plan_packs(batch.rows, weights_R=objective.row_weights(batch), version=5, budget=40)
    assert policy.traits.prefix_tree
    assert policy.traits.linear_head
    assert len(packs) > 1
    for pack in packs:
        tensors = {n: torch.from_numpy(getattr(pack, n)).double() for n in ("behaviour_K", "advantages_K", "weights_K")}
        objective(Trained(logprobs_K=policy(pack).logprobs_K, **tensors)).total.backward()
    for key, parameter in injection.adapter_parameters(ours).items():
        torch.testing.assert_close(parameter.grad, own[key].grad, atol=1e-10, rtol=1e-9)
        assert parameter.grad.abs().max() > 1e-6
    assert all(p.grad is None for n, p in ours.named_parameters() if ".lora_" not in n)


def test_gradients_of_experts_equal_those_of_plain_peft(moe_dir, build_batch):
    """In float32, for the model's norms compute in it whatever they are given."""
    batch = build_batch(3, 3)
    objective = PolicyObjective(RunConfig())
    ours, base = (AutoModelForCausalLM.from_pretrained(moe_dir, dtype=torch.float32) for _ in range(2))
    theirs = _plain_peft(base, target_parameters=list(EXPERTS))
    injection.inject_adapters(ours, c.Lora(rank=RANK, alpha=ALPHA, target_parameters=EXPERTS), source=moe_dir)
    own = {n.replace(".default", ""): p for n, p in theirs.named_parameters() if p.requires_grad}
    assert own.keys() == injection.adapter_parameters(ours).keys()
    assert any("experts" in name for name in own)
    _shake(injection.adapter_parameters(ours))
    _shake(own)
    _backward(objective, batch, lambda: _padded_logprobs(theirs, batch))
    policy, packs = Policy(ours), plan_packs(batch.rows, weights_R=objective.row_weights(batch), version=5, budget=40)
    assert policy.traits.prefix_tree
    for pack in packs:
        tensors = {n: torch.from_numpy(getattr(pack, n)).float() for n in ("behaviour_K", "advantages_K", "weights_K")}
        objective(Trained(logprobs_K=policy(pack).logprobs_K, **tensors)).total.backward()
    for key, parameter in injection.adapter_parameters(ours).items():
        largest = own[key].grad.abs().max()
        torch.testing.assert_close(parameter.grad, own[key].grad, atol=float(2e-4 * largest), rtol=1e-3)


def _padded_logprobs(model: Any, batch: Batch) -> torch.Tensor:
    longest = max(len(row.tokens) for row in batch.rows)
    ids = np.zeros((len(batch.rows), longest), np.int64)
    mask = np.zeros_like(ids)
    for at, row in enumerate(batch.rows):
        ids[at, : len(row.tokens)], mask[at, : len(row.tokens)] = row.tokens, 1
    logits = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits.log_softmax(-1)
    every = logits[:, :-1].gather(2, torch.from_numpy(ids)[:, 1:, None])[..., 0]
    return torch.cat(
        [every[at, : len(r.tokens) - 1][torch.from_numpy(r.loss_mask[1:])] for at, r in enumerate(batch.rows)]
    )


def _backward(objective: PolicyObjective, batch: Batch, logprobs: Callable[[], torch.Tensor]) -> None:
    def flat(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(r, name)[r.loss_mask] for r in batch.rows])).double()

    weights = np.concatenate(
        [[w] * int(r.loss_mask.sum()) for r, w in zip(batch.rows, objective.row_weights(batch), strict=True)]
    )
    objective(
        Trained(
            logprobs_K=logprobs(),
            behaviour_K=flat("logprobs"),
            advantages_K=flat("advantages"),
            weights_K=torch.from_numpy(weights),
        )
    ).total.backward()


def test_only_adapters_have_gradient_and_optimizer_state(model_dir, build_batch):
    core = TorchLearner(_config(model_dir()))
    frozen = {n: p.clone() for n, p in core.model.named_parameters() if ".lora_" not in n}
    core.step(build_batch())
    core.step(build_batch(seed=1))
    assert all(torch.equal(p, frozen[n]) for n, p in core.model.named_parameters() if n in frozen)
    shapes = sorted(tuple(state["exp_avg"].shape) for state in core.optimizer.state()["state"].values())
    assert shapes == sorted(tuple(tensor.shape) for tensor in core.tensors().values())


def test_adapters_start_as_nothing_and_follow_the_seed(model_dir, build_model):
    first, again, other = (TorchLearner(_config(model_dir(), run=c.Run(seed=seed))) for seed in (0, 0, 1))
    assert same(weights(first), weights(again))
    assert not same(weights(first), weights(other))
    ids = torch.arange(20)[None]
    assert torch.equal(first.model(ids).logits, build_model(dtype=torch.float32)(ids).logits)


def test_reference_is_the_model_without_its_adapters(model_dir, build_batch):
    core = TorchLearner(_config(model_dir(), algo=c.Algo(beta=0.5)))
    assert core.gradient.reference.policy is core.policy
    first, second = core.step(build_batch()), core.step(build_batch())
    assert first["kl/reference"] == pytest.approx(0, abs=1e-9)
    assert second["kl/reference"] > 1e-4
    plain = TorchLearner(_config(model_dir(), algo=c.Algo(beta=0.5), adapters=c.Full()))
    (pack,) = plan_packs(build_batch().rows, weights_R=np.ones(12), version=5, budget=1000)
    torch.testing.assert_close(core.gradient.reference_logprobs(pack), plain.gradient.reference_logprobs(pack))


@pytest.mark.parametrize("memory", [True, False])
def test_step_lowers_its_own_loss(memory, model_dir, build_batch):
    core = TorchLearner(_config(model_dir(), learner=c.LearnerConfig(lr=2e-2, gradient_checkpointing=memory)))
    losses = [core.step(build_batch())["train/loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.01


def test_dropout_acts_on_what_is_trained_alone(model_dir, build_batch):
    settings = c.Lora(rank=RANK, alpha=ALPHA, dropout=0.5)
    core, without = TorchLearner(_config(model_dir(), adapters=settings)), TorchLearner(_config(model_dir()))
    _shake(injection.adapter_parameters(core.model))
    _shake(injection.adapter_parameters(without.model))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(core.model(ids).logits, without.model(ids).logits)
    assert core.policy.traits.prefix_tree
    assert core.step(build_batch())["ratio/mean"] != without.step(build_batch())["ratio/mean"]


# ---- what is shipped ----------------------------------------------------------------------------------------------------------


def test_lora_ships_no_base_weights(model_dir):
    core, full = TorchLearner(_config(model_dir())), TorchLearner(_config(model_dir(), adapters=c.Full()))
    assert all(".lora_" in name for name in core.tensors())
    per_layer = RANK * (2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 24))
    assert sum(tensor.numel() for tensor in core.tensors().values()) == 2 * per_layer
    assert set(core.tensors()).isdisjoint(full.tensors())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_merged_weights_equal_those_peft_merges(name, model_dir, build_model):
    core = TorchLearner(_config(model_dir(name), adapters=MERGED))
    _shake(injection.adapter_parameters(core.model))
    theirs = _plain_peft(build_model(name, dtype=torch.float32))
    _shake({n.replace(".default", ""): p for n, p in theirs.named_parameters() if p.requires_grad})
    want = theirs.merge_and_unload().state_dict()
    assert same(weights(core), dict(want))
    assert set(want) == set(TorchLearner(_config(model_dir(name), adapters=c.Full())).tensors())


def test_merged_weights_are_the_same_bits_each_time(model_dir, build_batch):
    core = TorchLearner(_config(model_dir(), adapters=MERGED))
    frozen = {n: p.clone() for n, p in core.model.named_parameters() if ".lora_" not in n}
    core.step(build_batch())
    first, addresses = weights(core), {n: t.data_ptr() for n, t in core.tensors().items()}
    for _ in range(5):
        assert same(first, weights(core))
    assert {n: t.data_ptr() for n, t in core.tensors().items()} == addresses
    assert all(torch.equal(p, frozen[n]) for n, p in core.model.named_parameters() if n in frozen)
    core.step(build_batch(seed=1))
    assert not same(first, weights(core))


def test_both_kinds_train_alike(model_dir, build_batch):
    one, other = (TorchLearner(_config(model_dir(), adapters=kind)) for kind in (LORA, MERGED))
    reports = [[core.step(build_batch(seed=seed)) for seed in range(3)] for core in (one, other)]
    assert [r["train/loss"] for r in reports[0]] == [r["train/loss"] for r in reports[1]]
    assert same(weights(one), {n: p.detach() for n, p in injection.adapter_parameters(other.model).items()})


def test_experts_of_a_mixture_are_trained_and_merged(moe_dir, build_batch):
    settings = {"rank": RANK, "alpha": ALPHA, "targets": ("q_proj",), "target_parameters": EXPERTS}
    core = TorchLearner(_config(moe_dir, adapters=c.LoraMerged(**settings)))
    before = weights(core)
    for seed in range(2):
        core.step(build_batch(seed=seed))
    after = core.tensors()
    moved = sorted({name.rpartition("layers.0.")[2] for name in before if not torch.equal(before[name], after[name])})
    assert [name for name in moved if "layers" not in name and name] == [
        "mlp.experts.down_proj",
        "mlp.experts.gate_up_proj",
        "self_attn.q_proj.weight",
    ]
    plain = AutoModelForCausalLM.from_pretrained(moe_dir, dtype=torch.float32)
    plain.load_state_dict(dict(after))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, core.model(ids).logits, atol=1e-5, rtol=1e-5)


# ---- what is saved ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LORA, MERGED], ids=["lora", "lora_merged"])
def test_checkpoint_continues_as_if_never_stopped(kind, model_dir, build_batch, tmp_path):
    config = _config(model_dir(), adapters=kind, algo=c.Algo(beta=0.1))
    check_continues(config, tmp_path, build_batch, build_batch(seed=1))


@pytest.mark.parametrize("kind", [LORA, MERGED], ids=["lora", "lora_merged"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_checkpoint_is_a_directory_peft_loads(name, kind, model_dir, build_batch, tmp_path):
    core = TorchLearner(_config(model_dir(name), adapters=kind))
    core.step(build_batch())
    saved = tmp_path / "saved"
    saved.mkdir()
    core.save(saved)
    assert not list(saved.glob("model*.safetensors"))
    (saved / "tokenizer_config.json").unlink()  # a stand-in, which no tokenizer can be made of
    base = AutoModelForCausalLM.from_pretrained(model_dir(name), dtype=torch.float32)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        want = core.model(ids).logits
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = peft.PeftModel.from_pretrained(base, saved).eval()
            alone = peft.AutoPeftModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
        torch.testing.assert_close(loaded(ids).logits, want)
        torch.testing.assert_close(alone(ids).logits, want)


def test_checkpoint_of_experts_is_a_directory_peft_loads(moe_dir, build_batch, tmp_path):
    core = TorchLearner(_config(moe_dir))
    core.step(build_batch())
    saved = tmp_path / "saved"
    saved.mkdir()
    core.save(saved)
    base = AutoModelForCausalLM.from_pretrained(moe_dir, dtype=torch.float32)
    ids = torch.arange(20)[None]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = peft.PeftModel.from_pretrained(base, saved).eval()
        torch.testing.assert_close(loaded(ids).logits, core.model(ids).logits)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("torn weights", "adapter"),
        ("torn config", "adapter"),
        ("no weights", "adapter"),
        ("torn state", "damaged"),
        ("rank", r"adapters\.rank is 2 there and 3 here"),
        ("alpha", r"adapters\.alpha is 9.* there and 7 here"),
        ("targets", r"adapters\.targets differ: .*lora_A.weight is None, not \(3, 24\)"),
        ("a full model", "cannot read the adapter"),
    ],
)
def test_damaged_or_other_checkpoint_is_refused_and_the_learner_goes_on(
    damage, message, model_dir, build_batch, tmp_path
):
    core = TorchLearner(_config(model_dir()))
    core.step(build_batch())
    kinds = {
        "rank": c.Lora(rank=2, alpha=ALPHA),
        "alpha": c.Lora(rank=RANK, alpha=9),
        "targets": c.Lora(rank=RANK, alpha=ALPHA, targets=("q_proj", "o_proj")),
        "a full model": c.Full(),
    }
    source = TorchLearner(_config(model_dir(), adapters=kinds[damage])) if damage in kinds else core
    saved = tmp_path / "saved"
    saved.mkdir()
    source.step(build_batch())
    source.save(saved)
    files = {"torn weights": directory.WEIGHTS, "torn config": directory.CONFIG, "torn state": "learner.pt"}
    if damage in files:
        (saved / files[damage]).write_bytes((saved / files[damage]).read_bytes()[:100])
    elif damage == "no weights":
        (saved / directory.WEIGHTS).unlink()
    before = weights(core)
    with pytest.raises(CheckpointError, match=message) as caught:
        core.load(saved)
    assert "\n" not in str(caught.value)
    assert same(before, weights(core))
    core.step(build_batch())


def test_training_starts_from_a_peft_directory(model_dir, build_batch, tmp_path):
    first = TorchLearner(_config(model_dir()))
    first.step(build_batch())
    saved = tmp_path / "saved"
    saved.mkdir()
    first.save(saved)
    start = c.Lora(rank=RANK, alpha=ALPHA, init=str(saved))
    core = TorchLearner(_config(model_dir(), adapters=start, algo=c.Algo(beta=0.5)))
    assert same(weights(first), weights(core))
    reports = [core.step(build_batch()) for _ in range(2)]
    assert reports[0]["kl/reference"] == pytest.approx(0, abs=1e-9)
    assert reports[1]["kl/reference"] > 1e-4
    with pytest.raises(ConfigError, match=r"adapters\.init = .* adapters\.rank is 3 there and 4 here"):
        TorchLearner(_config(model_dir(), adapters=c.Lora(rank=4, alpha=ALPHA, init=str(saved))))
    with pytest.raises(ConfigError, match=r"adapters\.init = .*nowhere"):
        TorchLearner(_config(model_dir(), adapters=c.Lora(init=str(tmp_path / "nowhere"))))


# ---- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ("q_proj", "vproj")}, r"adapters\.targets = 'vproj': no layer .* nearest are v_proj"),
        ({"targets": ("nothing.like.it",)}, r"adapters\.targets = 'nothing\.like\.it': no layer"),
        ({"targets": ("input_layernorm",)}, r"adapters\.targets = .*input_layernorm"),
        ({"target_parameters": ("experts.w1",)}, r"adapters\.target_parameters = 'experts\.w1': no layer"),
    ],
)
def test_unknown_targets_are_refused_before_weights_are_loaded(settings, message, model_dir):
    path = model_dir()
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=message):
        TorchLearner(_config(path, adapters=c.Lora(**settings)))


def test_dropout_of_experts_is_refused(moe_dir):
    with pytest.raises(ConfigError, match="dropout"):
        TorchLearner(_config(moe_dir, adapters=c.Lora(dropout=0.1)))


def test_weight_of_two_layers_cannot_be_merged(model_dir):
    with pytest.raises(ConfigError, match=r"lm_head\.weight and model\.embed_tokens\.weight|embed_tokens.*lm_head"):
        TorchLearner(_config(model_dir(), adapters=c.LoraMerged(targets=("embed_tokens",))))


def test_missing_peft_is_named_with_its_extra(model_dir, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigError, match=r"corrente\[lora\]"):
        TorchLearner(_config(model_dir()))


# ---- a directory per version ---------------------------------------------------------------------------------------------------


def test_versions_are_written_once_as_directories_peft_loads(model_dir, build_batch, tmp_path):
    core = TorchLearner(_config(model_dir()))
    exporter = directory.Exporter(LORA, source=model_dir())
    first = exporter.write(tmp_path / "adapters", core.tensors(), run="sums", version=0)
    core.step(build_batch())
    second = exporter.write(tmp_path / "adapters", core.tensors(), run="sums", version=1)
    assert [path.name for path in (first, second)] == ["sums-v0", "sums-v1"]
    assert sorted(path.name for path in second.iterdir() if path.suffix != ".md") == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert json.loads((second / "adapter_config.json").read_text())["r"] == RANK
    base = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    ids = torch.arange(20)[None]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(
            peft.PeftModel.from_pretrained(base, second).eval()(ids).logits, core.model(ids).logits
        )
    with pytest.raises(SyncError, match="written once"):
        exporter.write(tmp_path / "adapters", core.tensors(), run="sums", version=1)
    with pytest.raises(SyncError, match="not an adapter of this run"):
        exporter.write(tmp_path / "adapters", {}, run="sums", version=2)
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == ["sums-v0", "sums-v1"]
