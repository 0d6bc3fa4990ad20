"""The rules that keep the parts apart: who may import whom, how large a file may grow, what the core must not touch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "corrente"

CONTRACTS: dict[str, dict[str, Any]] = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
LAYERS = [[name.strip() for name in layer.split("|")] for layer in CONTRACTS["layers"]["layers"]]
"""Top to bottom. pyproject.toml alone says it: import-linter holds imports to it, and this file holds dotted strings to it."""
CORE = [name.removeprefix("corrente.") for name in CONTRACTS["core"]["source_modules"]]
TRACKERS = ("tensorboard_sink", "trackio_sink", "wandb_sink")
CONTROL = ("controller", "common/waiting", "buffer", "staleness", "inflight")
STAGES = tuple(name for layer in LAYERS if {"engine", "score"} & set(layer) for name in layer)
"""Folders of the stages and axes below the controller."""
DOTTED = re.compile(r"corrente\.(\w+)(\.\w+)*(:\w+)?")
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


def _depth(folder: str) -> int:
    """The layer of a folder or root module of the package, from the top; -1: of none."""
    return next((depth for depth, names in enumerate(LAYERS) if folder in names), -1)


def _strings_up(folder: str, source: str) -> list[str]:
    """Dotted strings of ``source``, a file of ``folder``, that name something above it or beside it."""
    return [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (found := DOTTED.fullmatch(node.value))
        and found[1] != folder
        and 0 <= _depth(found[1]) <= _depth(folder)
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


def test_root_of_the_package_holds_folders_and_three_files():
    assert sorted(file.name for file in SRC.glob("*.py")) == ["__init__.py", "errors.py", "version.py"]


def test_dotted_strings_obey_the_layers():
    """What ``load_object`` imports by name is an import too."""
    found = {
        str(f.relative_to(SRC)): _strings_up(f.relative_to(SRC).parts[0].removesuffix(".py"), f.read_text())
        for f in _files()
        if f != SRC / "__init__.py"
    }
    assert {file: names for file, names in found.items() if names} == {}


def test_dotted_string_that_goes_up_is_seen():
    assert _strings_up("engine", 'load_object("corrente.runtime.procs:ProcsRuntime")') == [
        "corrente.runtime.procs:ProcsRuntime"
    ]
    assert _strings_up("engine", 'load_object("corrente.learner.core:TorchLearner")') == [
        "corrente.learner.core:TorchLearner"
    ]
    assert _strings_up("runtime", 'load_object("corrente.learner.core:TorchLearner")') == []
    assert _strings_up("engine", 'KEY = "corrente.toml"') == []


def _is_defined(path: str) -> bool:
    """True when a path "package.module", "package.module:attribute" or "package.module.attribute" names what its text defines."""
    module, _, attribute = path.partition(":")
    file = SRC.parent / (module.replace(".", "/") + ".py")
    file = file if file.exists() else SRC.parent / module.replace(".", "/") / "__init__.py"
    if not attribute and not file.exists():
        module, _, attribute = module.rpartition(".")
        file = SRC.parent / (module.replace(".", "/") + ".py")
    if not attribute or not file.exists():
        return file.exists()
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        names |= {getattr(node, "name", "")}
        names |= {target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)}
        names |= {alias.asname or alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
    return attribute in names


def test_dotted_strings_name_what_there_is():
    found = {
        f"{f.relative_to(SRC)}: {node.value}"
        for f in _files()
        for node in ast.walk(ast.parse(f.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if (match := DOTTED.fullmatch(node.value)) and _depth(match[1]) >= 0 and not _is_defined(node.value)
    }
    assert found == set()


def test_dotted_string_that_names_nothing_is_seen():
    assert _is_defined("corrente.prompts.build:build_prompts")
    assert not _is_defined("corrente.prompts.build:nothing")
    assert not _is_defined("corrente.nowhere:at_all")


def test_controller_imports_only_base_modules_of_the_stages():
    """The controller depends on Protocols: what implements them is chosen by the entry points."""
    names = [name for file in _files("controller") for name in _imports(file.read_text())]
    stages = [name for name in names if name.startswith("corrente.") and name.split(".")[1] in STAGES]
    assert [name for name in stages if name.split(".")[2] != "base"] == []


def test_no_public_class_name_is_defined_twice():
    """A name stands for one thing in the whole package."""
    defined: dict[str, list[str]] = {}
    for file in _files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(str(file.relative_to(SRC)))
    assert {name: files for name, files in defined.items() if len(files) > 1} == {}


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
        if str(f.relative_to(SRC)) not in {"cli/main.py", "observe/console.py"}
        for n in ast.walk(ast.parse(f.read_text()))
        if isinstance(n, ast.Call) and (call := ast.unparse(n.func)) in {"print", "logging.basicConfig"}
    ]
    assert found == []
