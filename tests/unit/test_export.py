"""A run on the hub: what its card says, what is uploaded and what is not, against a hub of our own on this machine."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from corrente.cli.main import app
from corrente.config.load import dump_config, parse_config
from corrente.controller.checkpoint_folder import LEARNER, MARKER
from corrente.entrypoints import export
from corrente.errors import CheckpointError, ConfigError, FetchError

pytestmark = pytest.mark.slow


def _run(tmp_path: Path, **sections: Any) -> Path:
    """The folder of a run of 40 steps, evaluated every tenth, with two checkpoints."""
    folder = tmp_path / "sums"
    tables: dict[str, Any] = {"run": {"name": "sums", "steps": 40}, **sections}
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(parse_config(tables)))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 41):
            file.write(json.dumps({"step": step, "reward/mean": step / 100, "lag/mean": 1.0}) + "\n")
            if not step % 10:
                file.write(json.dumps({"step": step, "eval/reward": step / 50}) + "\n")
    for step in (20, 40):
        learner = folder / "checkpoints" / f"step-{step:06d}" / LEARNER
        learner.mkdir(parents=True)
        for name in ("config.json", "model.safetensors", "tokenizer.json", "learner.pt"):
            (learner / name).write_text(f"{name} of step {step}")
        (learner.parent / MARKER).touch()
    return folder


class Hub(ThreadingHTTPServer):
    """As much of the hub as an upload needs: everything is committed inline."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.tokens: set[str] = set()
        self.refuses = False


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if self.server.refuses:
            return self._say({"error": "Repository not found"}, 404)
        self._say({"siblings": [], "id": "me/sums"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.asked.append((self.command, self.path))
        self.server.tokens.add(self.headers.get("Authorization", ""))
        if self.server.refuses:
            return self._say({"error": "You have no right to write here"}, 403)
        if self.path.startswith("/api/repos/create"):
            return self._say({"url": f"{self._home}/me/sums", "name": "me/sums"})
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return self._say({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        if "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines() if line.strip()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.server.files |= {file["path"]: base64.b64decode(file["content"]) for file in files}
            commit = {"commitUrl": f"{self._home}/me/sums/commit/1", "commitOid": "1", "success": True}
            return self._say(commit)
        return self._say({})

    @property
    def _home(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def _say(self, answer: Any, status: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    _point(monkeypatch, f"http://127.0.0.1:{made.server_port}")
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def _point(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    import huggingface_hub

    kept = huggingface_hub.HfApi.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        kept(self, *args, **{**options, "endpoint": endpoint})

    monkeypatch.setattr(huggingface_hub.HfApi, "__init__", init)


# ---- the card ----------------------------------------------------------------------------------------------------------------


def test_card_says_what_was_trained_how_it_went_and_how_to_load_it(tmp_path: Path):
    from huggingface_hub import ModelCard

    text = export.model_card(_run(tmp_path), repo="me/sums")
    data = ModelCard(text).data.to_dict()
    assert data["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "text-generation"
    assert "corrente" in data["tags"]
    assert "| step | reward | held-out reward | lag (versions) |" in text
    assert "| 40 | 0.4 | 0.8 | 1 |" in text
    assert "| 10 | 0.1 | 0.2 | 1 |" in text, "the first evaluation is shown"
    assert 12 <= text.count("\n| ") <= 30
    assert 'AutoModelForCausalLM.from_pretrained("me/sums")' in text
    assert "| completions | at most 64 tokens at temperature 1 |" in text


def test_card_of_adapters_loads_them_on_their_base(tmp_path: Path):
    from huggingface_hub import ModelCard

    text = export.model_card(_run(tmp_path, adapters={"kind": "lora"}), repo="me/sums")
    assert ModelCard(text).data.to_dict()["library_name"] == "peft"
    base = 'AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")'
    assert f'PeftModel.from_pretrained({base}, "me/sums")' in text


def test_card_of_a_local_model_names_no_base(tmp_path: Path):
    text = export.model_card(_run(tmp_path, model={"path": str(tmp_path)}))
    assert "base_model" not in text
    assert "A fine-tuned version of a model" in text


def test_tokens_are_no_part_of_what_is_shown(tmp_path: Path):
    folder = _run(tmp_path, engine={"kind": "vllm", "urls": ["http://127.0.0.1:1"], "token": 'se"cret'})
    assert "cret" in (folder / "config.toml").read_text()
    export.write_upload(folder, tmp_path / "out")
    for file in (tmp_path / "out").iterdir():
        assert "cret" not in file.read_text()


# ---- what is uploaded --------------------------------------------------------------------------------------------------------


def test_push_uploads_weights_tokenizer_card_and_config_and_nothing_else(tmp_path: Path, server: Hub):
    address = export.push_run(_run(tmp_path), "me/sums", token="hf_secret", private=True)
    assert address == f"http://127.0.0.1:{server.server_port}/me/sums"
    assert set(server.files) == {"README.md", "corrente.toml", "config.json", "model.safetensors", "tokenizer.json"}
    assert server.files["model.safetensors"] == b"model.safetensors of step 40"
    assert b"| 40 | 0.4 | 0.8 | 1 |" in server.files["README.md"]
    assert server.tokens == {"Bearer hf_secret"}


def test_push_of_an_earlier_checkpoint(tmp_path: Path, server: Hub):
    export.push_run(_run(tmp_path), "me/sums", checkpoint_name="step-000020", token="hf_secret")
    assert server.files["model.safetensors"] == b"model.safetensors of step 20"


def test_push_that_the_hub_refuses_says_what_it_said(tmp_path: Path, server: Hub):
    server.refuses = True
    with pytest.raises(FetchError, match=r"me/sums was not uploaded to http://127\.0\.0\.1:\d+: .*403"):
        export.push_run(_run(tmp_path), "me/sums", token="hf_secret")
    assert server.files == {}


def test_push_without_a_network_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _point(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(FetchError, match=r"me/sums was not uploaded to http://127\.0\.0\.1:9"):
        export.push_run(_run(tmp_path), "me/sums", token="hf_secret")


def test_push_refuses_what_it_cannot_upload(tmp_path: Path):
    folder = _run(tmp_path)
    with pytest.raises(ConfigError, match="--repo 'sums': it must be OWNER/NAME"):
        export.push_run(folder, "sums")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint 'step-000030'"):
        export.write_upload(folder, tmp_path / "out", checkpoint_name="step-000030")
    with pytest.raises(ConfigError, match=r"it has no config\.toml"):
        export.model_card(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        export.write_upload(folder, tmp_path / "full")


def test_command_writes_what_it_would_upload(tmp_path: Path):
    folder = _run(tmp_path)
    done = CliRunner().invoke(app, ["push", str(folder), "--out", str(tmp_path / "out")])
    assert (done.exit_code, done.stdout.strip()) == (0, str(tmp_path / "out"))
    assert (tmp_path / "out" / "README.md").is_file()
    for wrong in ([], ["--repo", "me/sums", "--out", "x"]):
        assert CliRunner().invoke(app, ["push", str(folder), *wrong]).exit_code == 2
