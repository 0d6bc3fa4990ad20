"""A run's model on the Hugging Face hub: its files, and a card that says where it comes from. Through huggingface_hub.

    model_card(folder) -> str          the model card of a run: what was trained, on what, how it went, how to load it
    write_upload(folder, target)       what would be uploaded, as a directory
    push_run(folder, repo) -> str      upload it; the address of the repository

The card is made from the run folder: its config and its metrics. Nothing else is uploaded than ``write_upload`` writes: the
weights and tokenizer of a checkpoint, the card and the config; no optimizer state, no samples, no prompts.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corrente.config import Full, RunConfig, schema
from corrente.config.load import load_config
from corrente.controller import checkpoint_folder
from corrente.data.checkpoint_names import CHECKPOINTS, LEARNER
from corrente.entrypoints import run_folder
from corrente.errors import CheckpointError, ConfigError, FetchError
from corrente.observe.jsonl import read_metrics
from corrente.version import __version__

LEFT_OUT = ("learner.pt",)
"""Files of a checkpoint that only a resumed run needs."""
POINTS = 12
"""Rows of the table that shows the course of a run."""
HUB_NAMES = {"smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Names on the hub of models that have a short name here."""
SECRET = re.compile(r'\btoken = "(?:[^"\\]|\\.)*"')
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
COURSE = {
    "reward/mean": "reward",
    "eval/reward": "held-out reward",
    "completion/tokens_mean": "tokens",
    "train/entropy": "entropy",
    "lag/mean": "lag (versions)",
}
"""Columns of the table that shows the course of a run: metric -> heading."""


def model_card(folder: Path, *, repo: str = "") -> str:
    """The text of a model card for the run in ``folder``. ConfigError when there is no run."""
    from huggingface_hub import ModelCardData

    config = _config(folder)
    whole = isinstance(config.adapters, Full)
    base = _base(config.model.path)
    kinds = [schema.kind_of(section) for section in (config.algo.advantage, config.algo.objective)]
    data = ModelCardData(
        base_model=base or None,
        library_name="transformers" if whole else "peft",
        pipeline_tag="text-generation",
        model_name=repo.rpartition("/")[2] or folder.name,
        tags=["corrente", "reinforcement-learning", *(kind.rpartition(":")[2] for kind in kinds)],
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {repo.rpartition('/')[2] or folder.name}",
        f"{'A fine-tuned version' if whole else 'An adapter'} of {_linked(base)}, trained with reinforcement learning by "
        f"corrente {__version__}, generation and training going on side by side.",
        "## How it was trained",
        _settings_table(config),
        "## How it went",
        _metrics_table(read_metrics(folder)),
        "## How to load it",
        _loading_code(repo or "PATH", base, whole=whole, trusted=config.model.trust_remote_code),
        "## Every setting",
        f"```toml\n{_public_config(folder).strip()}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def write_upload(folder: Path, target: Path, *, checkpoint_name: str = "", repo: str = "") -> Path:
    """Write into ``target``, which must not exist or be empty, what a push uploads. Returns the checkpoint it is of."""
    text = model_card(folder, repo=repo)
    chosen = _checkpoint(folder / CHECKPOINTS, checkpoint_name)
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty; name a new directory")
    shutil.copytree(chosen / LEARNER, target, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
    (target / "README.md").write_text(text, encoding="utf-8")
    (target / "corrente.toml").write_text(_public_config(folder), encoding="utf-8")
    return chosen


def push_run(
    folder: Path,
    repo: str,
    *,
    checkpoint_name: str = "",
    private: bool | None = None,
    token: str | None = None,
    message: str = "",
) -> str:
    """Upload the model of the run in ``folder`` to ``repo``, OWNER/NAME, which is made where it does not exist.

    Returns its address. ConfigError for what is wrong here, FetchError for what the hub or the way to it refuses. Without
    ``token`` it is the one that ``hf auth login`` or $HF_TOKEN gave.
    """
    if not HUB_NAME.fullmatch(repo):
        raise ConfigError(f"--repo {repo!r}: it must be OWNER/NAME")
    with tempfile.TemporaryDirectory(prefix="corrente-push-") as staged:
        chosen = write_upload(folder, Path(staged), checkpoint_name=checkpoint_name, repo=repo)
        return upload_folder(
            Path(staged), repo, private=private, token=token, message=message or f"{folder.name}, {chosen.name}"
        )


def upload_folder(
    folder: Path, repo: str, *, private: bool | None = None, token: str | None = None, message: str, branch: str = ""
) -> str:
    """Upload a directory, to ``branch`` or main; the address of the repository. FetchError when that does not succeed."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    hub = HfApi(token=token)
    try:
        made = hub.create_repo(repo, private=private, exist_ok=True)
        if branch:
            hub.create_branch(made.repo_id, branch=branch, exist_ok=True)
        hub.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message, revision=branch or None)
    except Exception as error:  # of the network and the hub; what they raise differs from version to version
        reason = " ".join(str(error).split())[:300]
        raise FetchError(f"{repo} was not uploaded to {hub.endpoint}: {type(error).__name__}: {reason}") from error
    return str(made)


def _public_config(folder: Path) -> str:
    """The run's config, without what gives access to anything."""
    return SECRET.sub('token = ""', (folder / run_folder.CONFIG).read_text(encoding="utf-8"))


def _config(folder: Path) -> RunConfig:
    if not (folder / run_folder.CONFIG).is_file():
        raise ConfigError(f"{folder}: it has no {run_folder.CONFIG}; give the folder of a run")
    return load_config(folder / run_folder.CONFIG)


def _checkpoint(folder: Path, name: str) -> Path:
    fit = [path for path in checkpoint_folder.complete(folder) if name in ("", path.name)]
    if not fit:
        raise CheckpointError(f"{folder} holds no complete checkpoint{f' {name!r}' if name else ''}")
    return fit[-1]


def _base(path: str) -> str:
    """The name on the hub of what was trained; empty when it is not known."""
    name = HUB_NAMES.get(path, path)
    return name if HUB_NAME.fullmatch(name) and not Path(name).exists() else ""


def _linked(base: str) -> str:
    return f"[{base}](https://huggingface.co/{base})" if base else "a model"


def _settings_table(config: RunConfig) -> str:
    prompts = config.prompts
    path = getattr(prompts, "path", "")
    source = schema.kind_of(prompts) + (f" `{path}`" if path else "")
    rewards = [*config.reward.functions, *(schema.kind_of(scorer) for scorer in config.reward.scorers)]
    rows = {
        "prompts": source,
        "rewards": ", ".join(f"`{name}`" for name in rewards) or "of the environment",
        "steps": f"{config.run.steps}, of {config.run.prompts_per_step} prompts x {config.run.group_size} completions",
        "completions": f"at most {config.sampling.max_tokens} tokens at temperature {config.sampling.temperature:g}",
        "advantage, objective": f"{schema.kind_of(config.algo.advantage)}, {schema.kind_of(config.algo.objective)}",
        "learning rate": f"{config.learner.lr:g}, {config.learner.schedule}",
        "weights trained": schema.kind_of(config.adapters),
        "asynchrony": f"buffer {schema.kind_of(config.buffer)}, at most {config.staleness.max} versions ahead, "
        f"weights in flight: {schema.kind_of(config.inflight)}",
    }
    return _table(["", ""], [[name, value] for name, value in rows.items()])


def _metrics_table(records: Sequence[Mapping[str, Any]]) -> str:
    shown = [name for name in COURSE if any(name in record for record in records)]
    if not records or not shown:
        return "Nothing was measured."
    last = len(records) - 1
    picked = sorted({round(at * last / (POINTS - 1)) for at in range(POINTS)})
    held_out = {at for at, record in enumerate(records) if "eval/reward" in record}
    rows = [
        [str(records[at]["step"]), *(_number(records[at].get(name)) for name in shown)]
        for at in sorted({*picked, min(held_out, default=0), max(held_out, default=last)})
    ]
    return _table(["step", *(COURSE[name] for name in shown)], rows)


def _loading_code(name: str, base: str, *, whole: bool, trusted: bool) -> str:
    how = ", trust_remote_code=True" if trusted else ""
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{name}"{how})'
    if whole:
        code = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{name}"{how})\n{tokenizer}'
        )
    else:
        code = (
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base or "BASE"}"{how}), "{name}")\n'
            f"{tokenizer}"
        )
    return f"```python\n{code}\n```"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
