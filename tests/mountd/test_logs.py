"""Log lines: for people, for machines, for the journal; and files that are rotated."""

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxfs.errors import ConfigError
from ctxfs.settings import LogConfig
from mountd import logs

log = logging.getLogger("ctxfs.part")


@pytest.fixture(autouse=True)
def _root_logger_is_put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_human_line_has_time_level_logger_text_and_extras(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.setup(LogConfig())
    log.warning("moved %d", 3, extra={"key": b"a/\xff", "tier": "cold"})
    line = capsys.readouterr().err
    assert line[:2] == "20"
    assert line[23:] == " warning ctxfs.part: moved 3 key=a/\\xff tier=cold\n"


def test_the_least_level_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(LogConfig(level="warning"))
    log.info("no")
    logs.set_level(LogConfig(level="info"))
    log.info("yes")
    written = capsys.readouterr().err
    assert " no" not in written
    assert " yes" in written


def test_a_block_name_cannot_write_to_the_terminal_or_forge_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.setup(LogConfig())
    log.info("dropped %s", "x\x1b[2J\nerror ctxfs: forged\udcff")
    (line,) = capsys.readouterr().err.splitlines()
    assert "x\\x1b[2J\\nerror ctxfs: forged\\xdcff" in line


def test_a_json_line_keeps_the_extras(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(LogConfig(format="json"))
    log.info("sealed %s", "a\nb", extra={"size": 7, "key": b"k\xff", "path": Path("/x")})
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "info",
        "logger": "ctxfs.part",
        "message": "sealed a\nb",
        "size": 7,
        "key": "k\\xff",
        "path": "/x",
    }


@pytest.mark.parametrize("form", ["human", "json"])
def test_a_traceback_is_kept(capsys: pytest.CaptureFixture[str], form: str) -> None:
    logs.setup(LogConfig(format="json" if form == "json" else "human"))
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        log.exception("failed")
    written = capsys.readouterr().err
    assert "RuntimeError: boom" in written
    assert len(written.splitlines()) == 1 or form == "human"


def test_in_the_journal_lines_carry_a_priority_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "journal", "w+") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        status = os.fstat(stream.fileno())
        environ = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        logs.setup(LogConfig(), environ)
        log.error("bad")
        stream.seek(0)
        assert stream.read() == "<3>error ctxfs.part: bad\n"


def test_another_stream_than_the_journal_gets_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(LogConfig(), {"JOURNAL_STREAM": "8:1234"})
    log.error("bad")
    assert capsys.readouterr().err.startswith("20")


def test_a_rotated_file_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logs.setup(LogConfig(file=path))
    log.info("first")
    path.rename(tmp_path / "log.1")
    log.info("second")
    logs.reopen()
    log.info("third")
    assert [line.split()[-1] for line in (tmp_path / "log.1").read_text().splitlines()] == [
        "first",
        "second",
    ]
    assert path.read_text().split()[-1] == "third"


def test_a_file_that_cannot_be_reopened_goes_on_in_the_old_one(tmp_path: Path) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    logs.setup(LogConfig(file=directory / "log"))
    directory.rename(tmp_path / "moved")
    logs.reopen()
    log.info("still here")
    text = (tmp_path / "moved" / "log").read_text()
    assert "cannot be reopened: No such file or directory" in text
    assert "still here" in text


def test_a_log_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log file .*/none/log: No such file or directory"):
        logs.setup(LogConfig(file=tmp_path / "none" / "log"))
