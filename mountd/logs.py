"""Log lines for people or for machines, and a file that can be rotated."""

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from ctxfs.errors import unusable
from ctxfs.settings import LogConfig

# Attributes every record has; whatever else a record carries came in by `extra=`.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}


def setup(config: LogConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Send every logger's lines where `config` says, in place of whatever was set up before.

    Raises ConfigError, or NoRoom, when the file cannot be opened.
    """
    handler = _handler(config)
    journal = config.file is None and _is_journal(sys.stderr, environ)
    handler.setFormatter(JsonLines() if config.format == "json" else HumanLines(journal=journal))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    set_level(config)


def _handler(config: LogConfig) -> logging.Handler:
    if config.file is None:
        return logging.StreamHandler(sys.stderr)
    try:
        return ReopenedFile(config.file, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise unusable(f"log file {config.file}", error) from None


def set_level(config: LogConfig) -> None:
    """Take over another level while running."""
    logging.getLogger().setLevel(config.level.upper())


def reopen() -> None:
    """After the log file was moved away: go on in a new one of the same name."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, ReopenedFile):
            handler.reopen()


class ReopenedFile(logging.FileHandler):
    """A log file that `logrotate` may move away."""

    def reopen(self) -> None:
        """Keeps the old file where a new one cannot be opened: better there than nowhere."""
        try:
            fresh = self._open()
        except OSError as error:
            logging.getLogger(__name__).error(
                "log file %s cannot be reopened: %s", self.baseFilename, error.strerror
            )
            return
        old = self.setStream(fresh)
        if old is not None:
            old.close()


class HumanLines(logging.Formatter):
    """`2026-01-31 12:00:00.000 warning cold: text name=value`, without the time in the journal.

    Names of blocks come from clients: control characters are shown, never sent to a terminal.
    """

    def __init__(self, *, journal: bool = False) -> None:
        super().__init__()
        self.journal = journal

    def format(self, record: logging.LogRecord) -> str:
        words = [record.levelname.lower(), f"{record.name}:", record.getMessage()]
        words += [f"{name}={value}" for name, value in _extra(record).items()]
        if not self.journal:
            moment = datetime.fromtimestamp(record.created)
            words.insert(0, moment.isoformat(" ", "milliseconds"))
        line = _visible(" ".join(words)).replace("\n", "\\n")
        if record.exc_info:
            line += "\n" + _visible(self.formatException(record.exc_info))
        if not self.journal:
            return line
        # sd-daemon(3): the journal takes the priority from the front of each line.
        priority = f"<{_PRIORITIES.get(record.levelno, 3)}>"
        return "\n".join(priority + each for each in line.splitlines())


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and what came by `extra=`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            **_extra(record),
            "time": moment.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=_plain)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    fields = {name: value for name, value in vars(record).items() if name not in _OWN}
    return {
        name: value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
        for name, value in fields.items()
    }


def _plain(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _visible(text: str) -> str:
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether the stream goes to the journal (systemd.exec(5), JOURNAL_STREAM)."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
