"""What a worker writes is kept, in files of bounded size and in memory, whatever it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from corrente.common.worker_log import LOG_FILES, TAIL_BYTES, WorkerLog, describe_output


def test_output_is_logged_line_by_line_however_it_arrives(tmp_path: Path):
    log = WorkerLog(tmp_path / "logs" / "x.log")
    for piece in (b"one\ntw", b"o\n", b"", b"\xff thr", b"ee"):
        log.write(piece)
    assert (tmp_path / "logs" / "x.log").read_text() == "one\ntwo\n"
    assert log.tail == "one\ntwo\n\ufffd three"
    log.close()
    assert (tmp_path / "logs" / "x.log").read_text() == "one\ntwo\n\ufffd three\n"


def test_log_goes_on_in_the_file_that_is_there(tmp_path: Path):
    for line in (b"before\n", b"after\n"):
        log = WorkerLog(tmp_path / "x.log")
        log.write(line)
        log.close()
    assert (tmp_path / "x.log").read_text() == "before\nafter\n"


def test_log_never_takes_more_than_its_files(tmp_path: Path):
    log = WorkerLog(tmp_path / "x.log", file_bytes=1000)
    for number in range(1000):
        log.write(b"%09d\n" % number)
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["x.log", "x.log.1", "x.log.2"]
    assert len(files) == LOG_FILES
    assert all(file.stat().st_size <= 1000 for file in files)
    assert files[0].read_text().endswith("000000999\n")


def test_line_without_an_end_is_logged_in_pieces_and_does_not_grow_in_memory(tmp_path: Path):
    log = WorkerLog(tmp_path / "x.log")
    for _ in range(40):
        log.write(b"x" * (TAIL_BYTES // 4))
    assert len(log.tail) == TAIL_BYTES
    log.close()
    assert (tmp_path / "x.log").read_text().count("x") == 10 * TAIL_BYTES


def test_full_disk_costs_lines_and_raises_nothing():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    log = WorkerLog(Path("/dev/full"))
    log.write(b"lost\n")
    assert log.tail == "lost\n"
    log.close()


def test_without_a_file_the_end_is_kept_in_memory():
    log = WorkerLog(None)
    log.write(b"a\nb\n")
    log.close()
    assert log.tail == "a\nb\n"


@pytest.mark.parametrize(
    ("lines", "log", "text"),
    [
        ([], None, "it wrote nothing to stderr"),
        (["", "  "], Path("x.log"), "it wrote nothing to stderr; see x.log"),
        (["a", "b", "", " c ", "d"], None, "last output: b / c / d"),
        (["a"], Path("logs/x.log"), "last output: a; see logs/x.log"),
    ],
)
def test_description_quotes_the_last_lines_and_names_the_log(lines: list[str], log: Path | None, text: str):
    assert describe_output(lines, log) == text
