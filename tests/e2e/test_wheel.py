"""The wheel: every file of the package is in it, and it works where there is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from tests.e2e.tiny import write_model, write_prompts

ROOT = Path(__file__).parents[2]
CONFIG = """
run = {name = "outside", steps = 2, prompts_per_step = 2, group_size = 4}
model = {path = "model"}
prompts = {kind = "jsonl", path = "prompts.jsonl"}
reward = {functions = ["rewards.py:answer_fraction"]}
sampling = {max_tokens = 6}
"""
TRAIN = """
import corrente
from pathlib import Path
assert Path(corrente.__file__).is_relative_to(Path(__import__("sys").prefix)), corrente.__file__
print(repr(corrente.train(corrente.load_config("outside.toml", ["runtime.kind=inline"]))))
"""
pytestmark = pytest.mark.slow


def files_of_the_package() -> set[str]:
    """What git tracks of it, or what lies there where there is no git."""
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.split() or [str(p.relative_to(ROOT)) for p in (ROOT / "src" / "corrente").rglob("*.*")]
    return {name.removeprefix("src/") for name in names if "__pycache__" not in name and ".egg-info" not in name}


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command that knows nothing of this checkout."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by setuptools from a copy, which it writes to; it is installed already, so nothing is downloaded."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", *(f"src/{name}" for name in files_of_the_package())):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel")
    run(*pip, "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", out, source, cwd=out)
    return next(out.glob("corrente-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel in it. Dependencies are those of this environment: its site-packages is on the path of
    the other, and a .pth file in it, such as that of an editable install, is not read."""
    home = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=home)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return home / "bin"


def test_wheel_holds_every_file_of_the_package_and_the_license(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == files_of_the_package()
    assert "corrente/py.typed" in names
    assert [name for name in names if name.endswith("licenses/LICENSE")] != []


def test_wheel_works_outside_the_checkout(installed: Path, tmp_path: Path):
    write_model(tmp_path / "model")
    write_prompts(tmp_path / "prompts.jsonl", count=40)
    (tmp_path / "rewards.py").write_text(
        "def answer_fraction(completions, answer, **_):\n"
        "    return [sum(c == a for c in t) / max(1, len(t)) for t, a in zip(completions, answer)]\n"
    )
    (tmp_path / "outside.toml").write_text(CONFIG)
    command = installed / "corrente"
    assert "ok  corrente" in run(command, "doctor", cwd=tmp_path)
    assert "# slots = 4" in run(command, "run", "outside.toml", "--dry-run", cwd=tmp_path)
    assert "steps         2 (all taken)" in run(command, "run", "outside.toml", cwd=tmp_path)
    assert "2 steps (all taken)" in run(installed / "python", "-c", TRAIN, cwd=tmp_path)
    mentioned = [
        path
        for path in (tmp_path / "runs").rglob("*.*")
        if path.suffix in (".toml", ".jsonl", ".json", ".log") and str(ROOT / "src") in path.read_text(errors="replace")
    ]
    assert mentioned == []
