"""Python code that comes with a model, and pickles: run by no load unless the user asked, whichever part loads."""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.tiny import tiny_config, write_model
from tests.unit.own_code import FILE, give_code, write_pickle
from transformers import AutoConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaForTokenClassification

from corrente import GRPOConfig, GRPOTrainer
from corrente import config as c
from corrente.adapters import directory, injection
from corrente.config import schema
from corrente.engine.embedded.adapters import load_frozen_model
from corrente.engine.embedded.core import EmbeddedCore
from corrente.engine.embedded.hf import HFModel
from corrente.engine.embedded.lean import LeanModel
from corrente.engine.embedded.stop_conditions import load_decoder
from corrente.engine.vllm import environment
from corrente.engine.vllm.environment import VllmEnvironment
from corrente.entrypoints.checks import check_config
from corrente.errors import CheckpointError, ConfigError
from corrente.learner import checkpoint
from corrente.learner.model import load_model
from corrente.learner.weights import WeightsCore
from corrente.models import cache, pretrained
from corrente.prompts.build import build_prompts
from corrente.prompts.tokenizer import Tokenizer
from corrente.score import networks, vocabulary
from corrente.trl import weights

SRC = Path(__file__).parents[2] / "src" / "corrente"
REFUSED = rf"model\.trust_remote_code = false.*{FILE}.*set model\.trust_remote_code = true"
PROCESS = {"tokenizer": "", "delimiter": "\n", "separator": "a", "label": 1}


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where code of a model would leave its marker; whoever asks on the terminal is told to go on."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    return tmp_path / "marker"


@pytest.fixture
def own(tmp_path: Path, marker: Path) -> Path:
    """A model of which transformers knows nothing but what its folder says."""
    return give_code(write_model(tmp_path / "own"), marker)


@pytest.fixture
def own_tokenizer(tmp_path: Path, marker: Path) -> Path:
    """A model whose tokenizer alone comes with code."""
    return give_code(write_model(tmp_path / "own_tokenizer"), marker, tokenizer=True)


def classifier(folder: Path, kind: Any) -> Path:
    write_model(folder)
    kind(AutoConfig.from_pretrained(folder, num_labels=2)).save_pretrained(folder)
    return folder


# ---- refused -------------------------------------------------------------------------------------------------------------------


LOADS: dict[str, Callable[[Path], object]] = {
    "engine": lambda folder: EmbeddedCore(model=folder),
    "engine with adapters": lambda folder: EmbeddedCore(model=folder, adapters=c.Lora()),
    "frozen weights": lambda folder: load_frozen_model(folder, dtype=torch.float32),
    "learner": lambda folder: load_model(folder, device="cpu"),
    "evaluation": lambda folder: WeightsCore(c.RunConfig(model=c.Model(path=str(folder)))),
    "evaluation of adapters": lambda folder: WeightsCore(
        c.RunConfig(model=c.Model(path=str(folder)), adapters=c.Lora())
    ),
    "model without weights": lambda folder: injection.meta_model(folder),
    "exported adapters": lambda folder: directory.Exporter(c.Lora(), source=folder),
    "reward model": lambda folder: networks.reward_model(path=str(folder), dtype="float32", chat=True, label=0),
    "process-reward model": lambda folder: networks.process_model(path=str(folder), dtype="float32", **PROCESS),
    "teacher": lambda folder: networks.teacher(path=str(folder), dtype="float32", tokenizer=""),
    "trainer's model": lambda folder: weights.load(folder, str(folder), str(folder)),
}
TOKENIZERS: dict[str, Callable[[Path], object]] = {
    "engine": load_decoder,
    "prompts": lambda folder: Tokenizer(folder).hf,
    "teacher": lambda folder: vocabulary.check_same_vocabulary(str(folder), str(folder)),
    "trainer": lambda folder: weights.load_tokenizer(str(folder)),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_code_of_a_model_is_run_by_no_load(own: Path, marker: Path, load: Callable[[Path], object]):
    with pytest.raises(ConfigError, match=REFUSED):
        load(own)
    assert not marker.exists()


@pytest.mark.parametrize("load", TOKENIZERS.values(), ids=TOKENIZERS)
def test_code_of_a_tokenizer_is_run_by_no_load(own_tokenizer: Path, marker: Path, load: Callable[[Path], object]):
    with pytest.raises(ConfigError, match=REFUSED):
        load(own_tokenizer)
    assert not marker.exists()


def test_model_with_code_is_refused_with_the_config(tmp_path: Path, own: Path, own_tokenizer: Path, marker: Path):
    for folder in (own, own_tokenizer):
        config = tiny_config(tmp_path, f'model.path="{folder}"')
        with pytest.raises(ConfigError, match=rf"model\.path = '{folder}' needs Python code.*{FILE}"):
            check_config(config)
        check_config(tiny_config(tmp_path, f'model.path="{folder}"', "model.trust_remote_code=true"))
    assert not marker.exists()


def test_model_with_code_for_a_head_that_transformers_lacks_is_refused(tmp_path: Path, marker: Path):
    """Of a configuration that transformers knows, and has no causal LM for."""
    folder = give_code(write_model(tmp_path / "known"), marker, model_type="distilbert")
    assert pretrained.code_needed(folder, kind="AutoConfig") == ""
    assert pretrained.code_needed(folder, kind="AutoModelForSequenceClassification") == ""
    assert pretrained.code_needed(folder, kind="AutoModelForCausalLM") == FILE
    with pytest.raises(ConfigError, match=REFUSED):
        EmbeddedCore(model=folder)
    assert not marker.exists()


def test_code_of_another_repository_is_named(own: Path):
    given = json.loads((own / "config.json").read_text())
    given["auto_map"] = {"AutoConfig": "someone/else--folder.configuration_own.OwnConfig"}
    (own / "config.json").write_text(json.dumps(given))
    assert pretrained.code_needed(own, kind="AutoConfig") == "someone/else/folder/configuration_own.py"


@pytest.mark.parametrize("kind", ["reward_model", "process_reward", "teacher"])
def test_scorer_with_code_is_refused_with_the_config(tmp_path: Path, own: Path, marker: Path, kind: str):
    scorer = {"kind": kind, "path": str(own)}
    config = tiny_config(tmp_path, f"reward.scorers=[{schema.show(scorer)}]", 'reward.functions=["exact_line"]')
    with pytest.raises(ConfigError, match=rf"reward\.scorers\[0\]\.path = '{own}' needs Python code.*{FILE}"):
        check_config(config)
    assert not marker.exists()


def test_tokenizer_of_a_served_teacher_with_code_is_refused_with_the_config(
    tmp_path: Path, own_tokenizer: Path, marker: Path
):
    scorer = {"kind": "teacher_server", "url": "http://host/v1", "model": "m", "tokenizer": str(own_tokenizer)}
    config = tiny_config(tmp_path, f"reward.scorers=[{schema.show(scorer)}]", 'reward.functions=["exact_line"]')
    with pytest.raises(ConfigError, match=r"reward\.scorers\[0\]\.tokenizer = .* needs Python code"):
        check_config(config)
    assert not marker.exists()


def trainer(tmp_path: Path, model: Any, reward: Any = None, **args: Any) -> GRPOTrainer:
    settings = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 6}
    return GRPOTrainer(
        model=model,
        reward_funcs=reward or (lambda completions, **_: [0.0] * len(completions)),
        args=GRPOConfig(output_dir=str(tmp_path / "out"), **{**settings, **args}),
        train_dataset=[{"prompt": "abcd"}],
    )


def test_trainer_refuses_a_model_with_code_at_construction(
    tmp_path: Path, own: Path, own_tokenizer: Path, marker: Path
):
    for folder in (own, own_tokenizer):
        with pytest.raises(ConfigError, match=rf"{REFUSED}.*is set by trust_remote_code = False"):
            trainer(tmp_path, str(folder))
    assert not marker.exists()


def test_trainer_refuses_a_reward_model_with_code_at_construction(tmp_path: Path, own: Path, marker: Path):
    model = str(write_model(tmp_path / "model"))
    with pytest.raises(ConfigError, match=REFUSED):
        trainer(tmp_path, model, [str(own)])
    assert not marker.exists()


def test_trainer_refuses_a_loaded_model_whose_tokenizer_has_code(tmp_path: Path, own_tokenizer: Path, marker: Path):
    loaded = LlamaForCausalLM.from_pretrained(write_model(tmp_path / "model"))
    loaded.config._name_or_path = str(own_tokenizer)
    with pytest.raises(ConfigError, match=REFUSED):
        trainer(tmp_path, loaded)
    assert not marker.exists()


@pytest.mark.parametrize(
    "args",
    [
        {"trust_remote_code": True},
        {"model_init_kwargs": {"trust_remote_code": True}},
        {"corrente": {"model.trust_remote_code": True}},
    ],
)
def test_trainer_takes_the_switch_where_trl_has_it(tmp_path: Path, own: Path, args: dict[str, Any]):
    assert trainer(tmp_path, str(own), **args).config.model.trust_remote_code is True


def test_trainer_refuses_a_switch_that_is_no_truth_value(tmp_path: Path, own: Path):
    with pytest.raises(ConfigError, match="trust_remote_code = 'yes': it must be True or False"):
        trainer(tmp_path, str(own), model_init_kwargs={"trust_remote_code": "yes"})


# ---- accepted ------------------------------------------------------------------------------------------------------------------


def test_classes_of_transformers_stand_in_for_code_that_is_not_trusted(tmp_path: Path, marker: Path):
    folder = give_code(write_model(tmp_path / "known"), marker, model_type="llama")
    check_config(tiny_config(tmp_path, f'model.path="{folder}"'))
    assert isinstance(EmbeddedCore(model=folder).model, LeanModel)
    assert isinstance(EmbeddedCore(model=folder, path="hf").model, HFModel)
    assert type(load_model(folder, device="cpu")) is LlamaForCausalLM
    assert not marker.exists()


def test_tokenizer_of_transformers_stands_in_for_code_that_is_not_trusted(tmp_path: Path, marker: Path):
    folder = give_code(write_model(tmp_path / "known"), marker, model_type="llama", tokenizer=True)
    assert pretrained.code_needed(folder, kind="AutoTokenizer") == ""
    assert Tokenizer(folder).encode("abc")
    assert not marker.exists()


def test_model_within_a_model_is_not_asked_about(marker: Path):
    """transformers does not hand its switch on to the models that a model is made of."""

    class Asking:
        @staticmethod
        def from_config(config: object, *, trust_remote_code: bool) -> None:
            from transformers.dynamic_module_utils import resolve_trust_remote_code

            resolve_trust_remote_code(None, "inner", has_local_code=False, has_remote_code=True)

    with pytest.raises(ValueError, match="trust_remote_code=True"):
        pretrained.from_config(Asking, None)


def test_launched_server_is_told_of_the_switch(tmp_path: Path):
    where = VllmEnvironment(python=Path("/v/bin/python"), package="vllm", version=environment.VERSION)
    for trusted in (False, True):
        switch = f"model.trust_remote_code={str(trusted).lower()}"
        config = tiny_config(tmp_path, "engine.kind=vllm", "runtime.kind=procs", "buffer.kind=window", switch)
        command = environment.arguments(config, where, socket=tmp_path / "http")
        assert ("--trust-remote-code" in command) is trusted


@pytest.mark.parametrize("flag", ["--trust-remote-code", "--trust_remote_code=true"])
def test_launched_server_is_not_told_otherwise_by_its_arguments(tmp_path: Path, flag: str):
    settings = ("engine.kind=vllm", "runtime.kind=procs", "buffer.kind=window", f'engine.args=["{flag}"]')
    with pytest.raises(ConfigError, match=r"engine\.args = .*set model\.trust_remote_code = true"):
        check_config(tiny_config(tmp_path, *settings))


# ---- datasets and pickles ------------------------------------------------------------------------------------------------------


def test_loading_script_of_a_dataset_is_not_run(tmp_path: Path, marker: Path):
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "sums.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    config = c.RunConfig(prompts=c.Dataset(path=str(folder)))
    with pytest.raises(ConfigError, match="scripts are no longer supported"):
        build_prompts(config, lambda text: [1])
    (folder / "sums.py").rename(folder / "other.py")
    (folder / "rows.jsonl").write_text('{"prompt": "ab"}\n')
    assert build_prompts(config, lambda text: [1]).next_prompt().text == "ab"
    assert not marker.exists()


def test_pickle_of_these_tests_runs_code_where_it_is_trusted(tmp_path: Path, marker: Path):
    with pytest.raises(RuntimeError, match="Invalid magic number"):
        torch.load(write_pickle(tmp_path / "pickle", marker), weights_only=False)
    assert marker.exists()


PICKLED: dict[str, tuple[Any, Callable[[Path], object]]] = {
    "learner": (LlamaForCausalLM, lambda folder: load_model(folder, device="cpu")),
    "engine with adapters": (LlamaForCausalLM, lambda folder: EmbeddedCore(model=folder, adapters=c.Lora())),
    "reward model": (
        LlamaForSequenceClassification,
        lambda folder: networks.reward_model(path=str(folder), dtype="float32", chat=True, label=0),
    ),
    "process-reward model": (
        LlamaForTokenClassification,
        lambda folder: networks.process_model(path=str(folder), dtype="float32", **PROCESS),
    ),
    "teacher": (
        LlamaForCausalLM,
        lambda folder: networks.teacher(path=str(folder), dtype="float32", tokenizer=""),
    ),
    "trainer's model": (LlamaForCausalLM, lambda folder: weights.load(folder, str(folder), str(folder))),
}


@pytest.mark.parametrize(("kind", "load"), PICKLED.values(), ids=PICKLED)
def test_pickled_weights_that_run_code_are_refused(
    tmp_path: Path, marker: Path, kind: Any, load: Callable[[Path], object]
):
    folder = classifier(tmp_path / "model", kind)
    (folder / "model.safetensors").unlink()
    write_pickle(folder / "pytorch_model.bin", marker)
    with pytest.raises(ConfigError, match="more than tensors"):
        load(folder)
    assert not marker.exists()


def test_pickled_adapter_beside_a_model_is_not_unpickled(tmp_path: Path, marker: Path):
    """transformers puts an adapter that lies in a model's folder on the model."""
    folder = write_model(tmp_path / "model")
    given = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "base_model_name_or_path": str(folder)}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    write_pickle(folder / "adapter_model.bin", marker)
    with pytest.raises(ConfigError):
        load_model(folder, device="cpu")
    assert not marker.exists()


def test_pickled_adapter_to_start_from_is_not_read(tmp_path: Path, marker: Path):
    folder, adapter = write_model(tmp_path / "model"), tmp_path / "adapter"
    adapter.mkdir()
    settings = c.Lora(init=str(adapter))
    given = {"peft_type": "LORA", "r": settings.rank, "lora_alpha": settings.alpha}
    (adapter / "adapter_config.json").write_text(json.dumps(given))
    write_pickle(adapter / "adapter_model.bin", marker)
    with pytest.raises(ConfigError, match=r"adapters\.init"):
        WeightsCore(c.RunConfig(model=c.Model(path=str(folder)), adapters=settings))
    assert not marker.exists()


def test_pickled_state_of_a_checkpoint_is_refused(tmp_path: Path, marker: Path):
    write_pickle(tmp_path / checkpoint.STATE, marker)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read_checkpoint(tmp_path, weights=lambda path: {}, device="cpu")
    assert not marker.exists()


# ---- one place -----------------------------------------------------------------------------------------------------------------


LOADERS = {"from_pretrained", "from_config", "get_class_from_dynamic_module", "hf_pipeline", "load_dataset_builder"}
ALLOWED = {"models/pretrained.py": LOADERS, "prompts/dataset.py": {"load_dataset"}}
"""datasets 4, the oldest that is allowed, runs no loading script."""


def unguarded(source: str, *, allowed: set[str] = frozenset()) -> list[str]:  # pyright: ignore[reportArgumentType]
    """Calls that may run code of a folder: loaders of transformers, peft and datasets, and whatever unpickles."""
    found: list[str] = []
    for node in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        called, options = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        name = called.rpartition(".")[2]
        dangerous = (
            (name in {*LOADERS, "load_dataset"} and not called.startswith("pretrained.") and name not in allowed)
            or called in ("pipeline", "transformers.pipeline")
            or (called == "torch.load" and options.get("weights_only") != "True")
            or (called == "np.load" and options.get("allow_pickle") != "False")
            or called.startswith(("pickle.", "cloudpickle.", "dill.", "joblib."))
        )
        found += [called] if dangerous else []
    return found


def test_every_load_goes_through_pretrained():
    files = {str(file.relative_to(SRC)): file.read_text() for file in SRC.rglob("*.py")}
    found = {name: unguarded(source, allowed=ALLOWED.get(name, set())) for name, source in files.items()}
    assert {name: calls for name, calls in found.items() if calls} == {}
    assert set(ALLOWED) <= set(files)


@pytest.mark.parametrize(
    "source",
    [
        "AutoModelForCausalLM.from_pretrained(path)",
        "transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)",
        "kind.from_config(config)",
        "datasets.load_dataset(path)",
        "pipeline('text-generation')",
        "torch.load(path)",
        "np.load(file)",
        "pickle.loads(data)",
    ],
)
def test_load_that_passes_pretrained_by_is_seen(source: str):
    assert len(unguarded(source)) == 1


def test_guarded_load_is_allowed():
    assert unguarded("torch.load(path, weights_only=True)\npretrained.from_config(kind, config)\npipeline.run(x)") == []


def test_known_models_have_no_code_of_their_own():
    assert all(pretrained.code_needed(cache.cache_dir() / name, kind="AutoConfig") == "" for name in cache.KNOWN_MODELS)
