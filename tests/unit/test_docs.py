"""README and docs are executed: every code block runs, every link leads somewhere, every table of numbers is recomputed.

A page is run in a folder of its own, from top to bottom, with `examples/` beside it:

    ```bash                 run by bash; the corrente command is this tree's, and `make` only says what it would do
    ```python               run by this Python
    ```toml file=NAME       written to NAME, for the blocks below;  ```python file=NAME  likewise
    ```toml                 must load as a configuration
    ```<language> model     only with the example model, in the test marked `model`
    ```<language> no-run    not run: it needs what a test cannot have

Other languages (text, mermaid) are pictures.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from msgspec import Struct

from corrente.config.load import parse_config
from corrente.staleness import gate

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "changelog.d").glob("*.md")),
]
RUNNABLE = {"bash", "python", "toml"}
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
PRELUDE = f'set -euo pipefail\nmake() {{ command make --no-print-directory -n -C {shlex.quote(str(ROOT))} "$@"; }}\n'


class Block(Struct, frozen=True, kw_only=True):
    language: str
    tags: frozenset[str]
    file: str
    text: str


def _blocks(text: str) -> list[Block]:
    blocks: list[Block] = []
    for info, body in FENCE.findall(text):
        language, *words = info.split() or [""]
        files = [word.removeprefix("file=") for word in words if word.startswith("file=")]
        tags = frozenset(word for word in words if not word.startswith("file="))
        blocks.append(Block(language=language, tags=tags, file=files[0] if files else "", text=body))
    return blocks


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _pages_with(*, model: bool) -> list[Path]:
    def wanted(block: Block) -> bool:
        return block.language in RUNNABLE and "no-run" not in block.tags and ("model" in block.tags) == model

    return [page for page in PAGES if any(map(wanted, _blocks(page.read_text())))]


def _run(block: Block, folder: Path) -> None:
    if block.file:
        (folder / block.file).write_text(block.text)
    if block.language == "toml":
        parse_config(tomllib.loads(block.text))
    elif not block.file:
        shell = ["bash", "-c", PRELUDE + block.text]
        command = shell if block.language == "bash" else [sys.executable, "-c", block.text]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, f"{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def _run_page(page: Path, folder: Path, *, model: bool) -> None:
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in _blocks(page.read_text()):
        if block.language in RUNNABLE and "no-run" not in block.tags and (model or "model" not in block.tags):
            _run(block, folder)


@pytest.mark.slow
@pytest.mark.parametrize("page", _pages_with(model=False), ids=_name)
def test_blocks_of_page_run(page: Path, tmp_path: Path):
    _run_page(page, tmp_path, model=False)


@pytest.mark.model
@pytest.mark.parametrize("page", _pages_with(model=True), ids=_name)
def test_blocks_of_page_run_with_the_model(page: Path, tmp_path: Path, smollm2: Path):
    assert smollm2.is_dir()
    _run_page(page, tmp_path, model=True)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_names_that_a_page_imports_exist(page: Path):
    for block in _blocks(page.read_text()):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(block.text))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "corrente":
                module = importlib.import_module(node.module or "")
                missing = [name.name for name in node.names if not hasattr(module, name.name)]
                assert not missing, f"{node.module} has no {missing}"


def test_failing_block_is_seen(tmp_path: Path):
    for text in ("```bash\nfalse\n```", "```python\nraise SystemExit(3)\n```", "```toml\n[run]\nstep = 1\n```"):
        block = _blocks(text)[0]
        with pytest.raises((AssertionError, ValueError)):
            _run(block, tmp_path)


def test_tags_of_blocks_are_known():
    for page in PAGES:
        for block in _blocks(page.read_text()):
            assert block.language in RUNNABLE | {"text", "mermaid", "json"}, f"{_name(page)}: ```{block.language}"
            assert block.tags <= {"model", "no-run"}, f"{_name(page)}: {block.tags}"


def _anchors(page: Path) -> set[str]:
    """The fragment identifiers of a page's headings, as GitHub derives them."""
    prose = FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_of_page_lead_somewhere(page: Path):
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_index_lists_every_page_of_the_docs():
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / link).resolve() for link in LINK.findall(index.read_text())}
    assert set((ROOT / "docs").rglob("*.md")) - {index} - listed == set()


def test_changelog_fragments_say_their_kind():
    kinds = [p.name.split(".")[1] for p in (ROOT / "changelog.d").glob("*.md") if p.name != "README.md"]
    assert set(kinds) <= {"added", "changed", "fixed", "removed"}


def test_staleness_page_states_the_slots_windows_and_bounds_of_the_code():
    page = (ROOT / "docs" / "explanation" / "staleness.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| age ≤? ?(\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(rows) >= 3
    for ahead, *stated in rows:
        tables = {"run": {"prompts_per_step": 8}, "staleness": {"max": int(ahead)}}
        config, strict = parse_config(tables), parse_config({**tables, "buffer": {"kind": "window", "window": 1}})
        derived = gate.slots(config), gate.max_age(strict), gate.window(config), gate.max_age(config)
        assert derived == tuple(map(int, stated))
