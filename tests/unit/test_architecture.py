"""The rules that keep the parts apart: who may import whom, how large a file may grow, what the core must not touch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "corrente"

STAGES = (
    *("prompts", "engine", "env", "score", "algo", "learner", "observe"),
    *("runtime", "buffer", "sync", "staleness", "inflight", "adapters", "backends"),
)
BOTTOM = (
    "types",
    "errors",
    "version",
    "kept",
    "routers",
    "tree",
    "waiting",
    "context",
    "devices",
    "dotted",
    "lags",
    "named",
    "offload",
    "plain",
    "reductions",
    "settling",
    "quiet",
    "randomness",
    "tls",
)
"""What every stage may use: the layers below config."""
SHARED = tuple(
    f"corrente.{name}"
    for name in (*BOTTOM, "config", "given", "playing", "scoring", "sections", "sources", "transports", "sync.layout")
)
TRACKERS = ("tensorboard_sink", "trackio_sink", "wandb_sink")
CONTROL = ("pipeline", "alarms", "budget", "ledger", "traffic", "waiting", "buffer", "staleness", "inflight")
CORE = (*CONTROL, "types", "errors", "config", "given", "scoring", "sections", "sources", "tree", "observe", "sim")
WALL_CLOCK_AND_THREADS = {"time", "datetime", "threading", "concurrent", "multiprocessing", "sched", "anyio.to_thread"}
BANNED_CALLS = {"create_task", "ensure_future", "gather", "wait"}


def _files(*parts: str) -> list[Path]:
    """Python files of the named modules or packages, all of src when none is named."""
    found: list[Path] = []
    for part in parts or ("",):
        found += [SRC / f"{part}.py"] if part and (SRC / f"{part}.py").exists() else sorted((SRC / part).rglob("*.py"))
    return found


def _imports(source: str) -> Iterator[str]:
    """Every dotted name that ``source`` imports, lazy imports and imported attributes included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _crossings(stage: str, source: str) -> list[str]:
    """Imports of ``source``, a file of ``stage``, that reach into another stage or up the page."""
    allowed = (*SHARED, f"corrente.{stage}")
    return [
        name
        for name in _imports(source)
        if name.startswith("corrente.")
        and not any(name == ok or name.startswith(f"{ok}.") for ok in allowed)
        and name.split(".")[2:3] not in (["base"], ["launcher"])
    ]


def _long_functions(source: str, limit: int) -> list[str]:
    return [
        f"{node.name} ({node.end_lineno - node.lineno + 1} lines)"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 >= limit
    ]


def _orphan_tasks(source: str) -> list[str]:
    """Calls of asyncio's own ways to start or await tasks without a parent."""
    banned = {f"asyncio.{name}" for name in BANNED_CALLS}
    imported = [name for name in _imports(source) if name in banned]
    called = [ast.unparse(n.func) for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]
    return imported + [name for name in called if name in banned]


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_imports_obey_the_contracts_of_import_linter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True) == 0


@pytest.mark.parametrize("stage", STAGES)
def test_stage_imports_no_other_stage(stage: str):
    crossings = {str(f.relative_to(SRC)): _crossings(stage, f.read_text()) for f in _files(stage)}
    assert not {file: names for file, names in crossings.items() if names}


def test_crossing_between_stages_is_seen():
    assert _crossings("buffer", "from corrente.staleness.gate import slots") == ["corrente.staleness.gate.slots"]
    assert _crossings("buffer", "def f():\n    import corrente.pipeline") == ["corrente.pipeline"]
    assert _crossings("buffer", "from corrente.buffer.slots import X\nfrom corrente.engine.base import Engine") == []
    assert _crossings("engine", "from corrente.sync.layout import Slab") == []


def test_pipeline_imports_only_base_modules_of_the_stages():
    names = [name for file in _files("pipeline") for name in _imports(file.read_text())]
    assert [n for n in names if n.split(".")[1:2] and n.split(".")[1] in STAGES and ".base" not in n] == []


def test_files_and_functions_stay_small():
    too_long = {str(f.relative_to(SRC)): len(f.read_text().splitlines()) for f in _files()}
    assert {name: lines for name, lines in too_long.items() if lines >= 400} == {}
    functions = {str(f.relative_to(SRC)): _long_functions(f.read_text(), 60) for f in _files()}
    assert {name: found for name, found in functions.items() if found} == {}


def test_long_function_is_seen():
    body = "\n".join("    x = 1" for _ in range(59))
    assert _long_functions(f"async def long():\n{body}", 60) == ["long (60 lines)"]
    assert _long_functions(f"async def long():\n{body}", 61) == []


def test_core_imports_without_torch():
    """With torch and its kind made unimportable, and every attempt recorded, all core modules import. The sinks of trackers are
    left out, for each needs its tracker."""
    code = f"""
import importlib, pkgutil, sys
tried = []
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "vllm", "ray", "deepspeed", "peft", "accelerate"):
            tried.append(name)
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
for part in {CORE!r}:
    module = importlib.import_module("corrente." + part)
    for info in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
        if not info.name.endswith({TRACKERS!r}):
            importlib.import_module(info.name)
assert not tried, tried
"""
    done = _run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("part", CONTROL)
def test_control_plane_owns_no_wall_clock_and_no_thread(part: str):
    for file in _files(part):
        names = list(_imports(file.read_text()))
        assert not [
            n for n in names for banned in WALL_CLOCK_AND_THREADS if n == banned or n.startswith(f"{banned}.")
        ], file
        assert "to_thread" not in file.read_text(), file


def test_every_task_has_a_parent():
    found = {str(f.relative_to(SRC)): _orphan_tasks(f.read_text()) for f in _files()}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_orphan_task_is_seen():
    assert _orphan_tasks("import asyncio\nasync def f():\n    asyncio.create_task(g())") == ["asyncio.create_task"]
    assert _orphan_tasks("from asyncio import gather") == ["asyncio.gather"]


def test_source_holds_no_stub_and_no_note_to_self():
    words = ("TODO", "FIXME", "XXX", "NotImplementedError")
    assert [f"{f.name}: {word}" for f in _files() for word in words if word in f.read_text()] == []


def test_library_never_prints_and_never_configures_logging():
    """The command line and the console sink write to the terminal; nothing else does."""
    found = [
        f"{f.relative_to(SRC)}: {call}"
        for f in _files()
        if f.name not in {"cli.py", "console.py"}
        for n in ast.walk(ast.parse(f.read_text()))
        if isinstance(n, ast.Call) and (call := ast.unparse(n.func)) in {"print", "logging.basicConfig"}
    ]
    assert found == []
