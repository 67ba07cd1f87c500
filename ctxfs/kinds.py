"""Kinds of configuration values: how each is read from TOML, and written back."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxfs.addresses import (
    ADDRESSES_ACCEPTED,
    MEMBERS_ACCEPTED,
    NAMES_ACCEPTED,
    URLS_ACCEPTED,
    check_address,
    check_name,
    check_url,
    check_zone,
    parse_member,
    write_member,
)
from ctxfs.errors import BadValue
from ctxfs.units import (
    DURATIONS_ACCEPTED,
    SIZES_ACCEPTED,
    format_duration,
    parse_duration_ns,
    parse_size,
    write_size,
)

TomlValue = str | int | float | bool | list[str]


@dataclass(frozen=True, slots=True)
class Kind:
    """`read` turns a TOML value into ours or raises BadValue; `write` is its inverse.

    `accepts` ends the sentence "… is not". `write` gives None for what is left out of a file.
    `words` are all that there are, where only some are accepted.
    """

    accepts: str
    read: Callable[[object], object]
    write: Callable[[Any], TomlValue | None]
    words: tuple[str, ...] = ()


def refusal(value: object, accepts: str) -> BadValue:
    """What a person wrote, and what would have been right."""
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return BadValue(f"{shown if len(shown) <= 80 else shown[:80] + '…'} is not {accepts}")


def _read_size(value: object) -> int:
    if isinstance(value, str):
        return parse_size(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise refusal(value, SIZES_ACCEPTED)


def _read_duration(value: object) -> int | None:
    if isinstance(value, str):
        return parse_duration_ns(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return parse_duration_ns(str(value))
    raise refusal(value, DURATIONS_ACCEPTED)


_WAITS_ACCEPTED = DURATIONS_ACCEPTED.removesuffix(" or none")


def _read_wait(value: object) -> int:
    duration_ns = _read_duration(value)
    if duration_ns is None:
        raise refusal(value, _WAITS_ACCEPTED)
    return duration_ns


_RATIO_ACCEPTED = "a ratio like 0.95 or 95%"


def _read_ratio(value: object) -> float:
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%", value)):
        return float(match[1]) / 100
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise refusal(value, _RATIO_ACCEPTED)


_MODE_ACCEPTED = 'permission bits as an octal string, like "1777"'


def _read_mode(value: object) -> int:
    if isinstance(value, str) and re.fullmatch("[0-7]{1,4}", value):
        return int(value, 8)
    raise refusal(value, _MODE_ACCEPTED)  # a bare 1777 would be a decimal number: never guessed


_FSNAME_ACCEPTED = "a name without commas, spaces or backslashes"


def _read_fsname(value: object) -> str:
    # It goes into a comma-separated list of mount options.
    if isinstance(value, str) and re.fullmatch(r"[^\s,\\]{1,64}", value):
        return value
    raise refusal(value, _FSNAME_ACCEPTED)


_NAME_ACCEPTED = "a name of at most 64 printable characters"


def _read_name(value: object) -> str:
    if isinstance(value, str) and 0 < len(value) <= 64 and value.isprintable():
        return value
    raise refusal(value, _NAME_ACCEPTED)


def _read_path(value: object) -> Path:
    if isinstance(value, str) and value and "\0" not in value:
        return Path(value)
    raise refusal(value, "a path")


_AUTO_ACCEPTED = 'true, false or "auto"'


def _read_auto(value: object) -> bool | None:
    if value == "auto":
        return None
    if isinstance(value, bool):
        return value
    raise refusal(value, _AUTO_ACCEPTED)


def _read_flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise refusal(value, "true or false")


def _read_count(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise refusal(value, "a whole number")


def one_of(*words: str) -> Kind:
    """One word of a fixed set."""
    accepts = " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))

    def read(value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        raise refusal(value, accepts)

    return Kind(accepts, read, str, words)


def _text(accepts: str, read: Callable[[str], object]) -> Kind:
    """A string that `read` checks."""

    def read_text(value: object) -> object:
        if isinstance(value, str):
            return read(value)
        raise refusal(value, accepts)

    return Kind(accepts, read_text, lambda text: text)


def _list_of(
    accepts: str, read: Callable[[str], object], write: Callable[[Any], str] = str
) -> Kind:
    """A list of strings, each of which `read` turns into one of ours; a tuple."""

    def read_list(value: object) -> tuple[object, ...]:
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(read(each) for each in value)
        raise refusal(value, f"a list, each of it {accepts}")

    return Kind(accepts, read_list, lambda found: [write(each) for each in found])


SIZE = Kind(SIZES_ACCEPTED, _read_size, lambda value: None if value is None else write_size(value))
DURATION = Kind(DURATIONS_ACCEPTED, _read_duration, format_duration)
WAIT = Kind(_WAITS_ACCEPTED, _read_wait, format_duration)
RATIO = Kind(_RATIO_ACCEPTED, _read_ratio, float)
MODE = Kind(_MODE_ACCEPTED, _read_mode, lambda mode: f"{mode:04o}")
FSNAME = Kind(_FSNAME_ACCEPTED, _read_fsname, str)
NAME = Kind(_NAME_ACCEPTED, _read_name, lambda name: name)
PATH = Kind("a path", _read_path, lambda path: None if path is None else str(path))
AUTO = Kind(_AUTO_ACCEPTED, _read_auto, lambda flag: "auto" if flag is None else flag)
FLAG = Kind("true or false", _read_flag, bool)
COUNT = Kind("a whole number", _read_count, int)
HOSTNAME = _text(NAMES_ACCEPTED, check_name)
ZONE = _text("a zone's name", check_zone)
ADDRESS = _text(ADDRESSES_ACCEPTED, check_address)
URLS = _list_of(URLS_ACCEPTED, check_url)
MEMBERS = _list_of(MEMBERS_ACCEPTED, parse_member, write_member)
