"""push_to_hub: the present weights, their tokenizer and the card of the last run, through huggingface_hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from corrente.entrypoints import export
from corrente.errors import ConfigError

CARD = "README.md"


def push(trainer: Any, *, commit_message: str, token: str | None = None, blocking: bool = True, **about: Any) -> str:
    """Upload to args.hub_model_id, or to a repository of the name of OUTPUT_DIR; returns its address.

    ``about`` goes into the head of the card: dataset_name, tags, model_name. Raises FetchError where the hub refuses.
    """
    for name in about:
        if name not in ("dataset_name", "tags", "model_name"):
            raise ConfigError(f"push_to_hub: {name} is not taken; it may be given dataset_name, tags and model_name")
    if not blocking:
        raise ConfigError("push_to_hub: blocking = False; it returns when everything is uploaded")
    args = trainer.args
    repository = args.hub_model_id or Path(args.output_dir or "trainer_output").resolve().name
    with tempfile.TemporaryDirectory(prefix="corrente-push-") as folder:
        trainer.save_model(folder)
        write_card(trainer, Path(folder), repository, about)
        token = token or args.hub_token
        return export.upload_folder(
            Path(folder),
            repository,
            private=args.hub_private_repo,
            token=token,
            message=commit_message,
            branch=args.hub_revision or "",
        )


def write_card(trainer: Any, folder: Path, repository: str, about: dict[str, Any]) -> None:
    """The card of the trainer's run, with what the caller adds to its head. Without a run there is none."""
    if trainer.run_folder is None:
        return
    from huggingface_hub import ModelCard

    card = ModelCard(export.model_card(trainer.run_folder, repo=repository))
    head: Any = card.data
    named = about.get("dataset_name")
    if named:
        head.datasets = [named] if isinstance(named, str) else list(named)
    if about.get("tags"):
        more = about["tags"]
        head.tags = [*(head.tags or ()), *([more] if isinstance(more, str) else more)]
    if about.get("model_name"):
        head.model_name = about["model_name"]
    card.save(folder / CARD)
