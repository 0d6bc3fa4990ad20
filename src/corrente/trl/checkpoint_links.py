"""OUTPUT_DIR/checkpoint-N: where TRL's checkpoints are, each a link to the one that the run wrote.

On a file system without symbolic links it is a folder with the same files, linked or copied one by one, and a note of where they
are from.
"""

from __future__ import annotations

import shutil
from pathlib import Path

NOTE = ".checkpoint"
"""File in such a folder: the path of the checkpoint, relative to OUTPUT_DIR."""


def link_checkpoint(link: Path, target: Path) -> None:
    """Let ``link`` be the folder ``target``, which lies below its parent. What was linked and is gone is removed."""
    output = link.parent
    for older in output.glob("checkpoint-*"):
        source = linked_checkpoint(older)
        if source is not None and (older == link or not source.exists()):
            older.unlink() if older.is_symlink() else shutil.rmtree(older)
    if link.exists():
        return
    try:
        link.symlink_to(target.relative_to(output))
    except OSError:
        link.mkdir()
        (link / NOTE).write_text(str(target.relative_to(output)), encoding="utf-8")
        for file in target.iterdir():
            link_file(file, link / file.name)


def linked_checkpoint(link: Path) -> Path | None:
    """The folder that a link of ours is; None for anything else."""
    if link.is_symlink():
        return link.parent / link.readlink()
    try:
        return link.parent / (link / NOTE).read_text(encoding="utf-8")
    except OSError:
        return None


def link_file(file: Path, link: Path) -> None:
    """Let ``link`` be ``file``: by a symbolic link, another name of it, or a copy, whatever the file system has."""
    for make in (Path.symlink_to, Path.hardlink_to):
        try:
            make(link, file.resolve())
        except OSError:
            continue
        return
    shutil.copyfile(file, link)
