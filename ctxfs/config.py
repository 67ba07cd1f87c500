"""The configuration: a TOML file and flags in, one frozen `Config` or every mistake at once out."""

import dataclasses
import difflib
import os
import stat
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxfs.errors import BadValue, ConfigError
from ctxfs.kinds import PATH
from ctxfs.relations import (
    COLD_BYTES_MIN,
    HOT_BYTES_MIN,
    broken_relations,
    default_block_bytes_max,
    default_hot_bytes,
    default_operation_deadline_ns,
)
from ctxfs.settings import (
    SINGLE_TABLES,
    TABLES,
    Channel,
    ClusterConfig,
    CodecConfig,
    ColdConfig,
    Config,
    DefaultsConfig,
    EngineName,
    HotConfig,
    Huge,
    Limits,
    LogConfig,
    LogFormat,
    LogLevel,
    MountConfig,
    OnTrouble,
    Override,
    WarmConfig,
    settings_of,
)
from ctxfs.units import MIB, format_size

__all__ = [
    "COLD_BYTES_MIN",
    "HOT_BYTES_MIN",
    "Channel",
    "ClusterConfig",
    "CodecConfig",
    "ColdConfig",
    "Config",
    "DefaultsConfig",
    "EngineName",
    "HotConfig",
    "Huge",
    "Limits",
    "LogConfig",
    "LogFormat",
    "LogLevel",
    "MountConfig",
    "OnTrouble",
    "Override",
    "WarmConfig",
    "default_hot_bytes",
    "load",
    "reread",
]

FILE_BYTES_MAX = MIB  # some hundred times what all keys need


def load(
    path: Path | None, overrides: Iterable[Override] = (), *, state: Path, memory_bytes: int
) -> Config:
    """Read `path` (None: no file), put the flags over it and check how the values relate.

    `state` is used where nobody names a state directory; `memory_bytes` (what this machine or
    container has) bounds the hot tier. Paths in the file are relative to its directory, those in
    flags to the working directory. Raises ConfigError with one line per mistake.
    """
    overrides = tuple(overrides)
    problems: list[str] = []
    given = {} if path is None else _given_by_file(path, problems)
    given = _overridden(given, overrides)
    tables = _read_values(given, problems)
    config = _build(tables, state, memory_bytes)
    for involved, text in broken_relations(config, memory_bytes):
        written = [each for name in involved for each in given.values() if each.name == name]
        # Of a value that could not be read, one complaint is enough.
        if not any(each.bad for each in written):
            place = written[0].place if written else _place(*involved[0].split("."))
            problems.append(f"{place}: {text}")
    if problems:
        raise ConfigError("\n".join(problems))
    return dataclasses.replace(config, source=path, overrides=overrides)


def reread(config: Config, *, memory_bytes: int) -> tuple[Config, list[str]]:
    """The file as it is now, as far as a running daemon can take it over.

    Also gives the names of changed keys that wait for the next start. Raises ConfigError; then
    the old configuration stays in force.
    """
    fresh = load(config.source, config.overrides, state=config.state, memory_bytes=memory_bytes)
    waiting = [name for name in ("state", "cold") if getattr(fresh, name) != getattr(config, name)]
    taken: dict[str, Any] = {}
    for name, table in SINGLE_TABLES.items():
        old, new = getattr(config, name), getattr(fresh, name)
        changes = {}
        for field_name, setting in settings_of(table):
            value = getattr(new, field_name)
            if value == getattr(old, field_name):
                continue
            if setting.reread:
                changes[field_name] = value
            else:
                waiting.append(f"{name}.{setting.key}")
        taken[name] = dataclasses.replace(old, **changes)
    return dataclasses.replace(config, **taken), waiting


@dataclass(slots=True)
class _Given:
    """One value somebody wrote: in which table ("" is the top), and at what place to mend it."""

    table: str
    key: str
    value: object
    place: str
    base: Path  # what a relative path is relative to
    bad: bool = False

    @property
    def name(self) -> str:
        return f"{self.table}.{self.key}" if self.table else self.key


# The device's number is 0 outside `[[cold]]`.
_Slot = tuple[str, int, str]
_AllGiven = dict[_Slot, _Given]


def _place(table: str, key: str = "") -> str:
    """How a key is called in the file: `[hot] size`."""
    if not key:
        return table
    return f"[[{table}]] {key}" if table == "cold" else f"[{table}] {key}" if table else key


def _given_by_file(path: Path, problems: list[str]) -> _AllGiven:
    base = Path(os.path.abspath(path)).parent
    given: _AllGiven = {}
    tables: list[Any]
    for name, value in _parsed(path).items():
        table, tables, shape = "", [{name: value}], ""
        if name in SINGLE_TABLES:
            table, tables = name, [value]
            shape = f"is a table: write [{name}] on a line of its own"
        elif name == "cold":
            table, tables = name, value if isinstance(value, list) else [None]
            shape = "is a list of tables: write [[cold]] before each device"
        if not all(isinstance(each, dict) for each in tables):
            problems.append(f"{path}: {name}: {shape}")
            continue
        for number, keys in enumerate(tables):
            if table == "cold" and "path" not in keys:
                problems.append(f"{path}: [[cold]] path: is missing from device {number + 1}")
            for key, each in keys.items():
                place = f"{path}: {_place(table, key)}"
                given[table, number, key] = _Given(table, key, each, place, base)
    return given


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_content(path).decode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # bad TOML, or not UTF-8
        raise ConfigError(f"{path}: is not TOML: {error}") from None


def _content(path: Path) -> bytes:
    """Raises OSError, and ConfigError for what would keep one reading, or waiting, for ever."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"{path}: is not a regular file")
        # What it says of its size is not always so.
        content = file.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than {format_size(FILE_BYTES_MAX)}")
    return content


def _overridden(given: _AllGiven, overrides: tuple[Override, ...]) -> _AllGiven:
    """The same with the flags' values in the place of the file's."""
    for flag in overrides:
        if flag.table == "cold" and not flag.key:
            given = {slot: each for slot, each in given.items() if slot[0] != "cold"}
            devices = enumerate(flag.value)
            wanted = [(number, *item) for number, device in devices for item in device.items()]
        elif flag.table == "cold":
            numbers = sorted({number for table, number, _ in given if table == "cold"})
            wanted = [(number, flag.key, flag.value) for number in numbers]
        else:
            wanted = [(0, flag.key, flag.value)]
        given |= {
            (flag.table, number, key): _Given(flag.table, key, value, flag.flag, Path.cwd())
            for number, key, value in wanted
        }
    return given


def _read_values(given: _AllGiven, problems: list[str]) -> dict[tuple[str, int], dict[str, Any]]:
    """Field values by table and device number; what cannot be read is a problem, and left out."""
    values: dict[tuple[str, int], dict[str, Any]] = {}
    for (table, number, key), each in given.items():
        known = {
            setting.key: (name, setting.kind)
            for name, setting in settings_of(TABLES.get(table, Config))
        }
        if key not in known:
            each.bad = True
            names = known if table else {*known, *TABLES}
            problems.append(f"{each.place}: {_unknown(key, names)}")
            continue
        name, kind = known[key]
        try:
            value = kind.read(each.value)
        except BadValue as error:
            each.bad = True
            problems.append(f"{each.place}: {error}")
            continue
        if kind is PATH:
            value = Path(os.path.normpath(each.base / str(value)))
        values.setdefault((table, number), {})[name] = value
    return values


def _unknown(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known))}"
    return f"there is no such name; {hint}"


def _build(values: dict[tuple[str, int], dict[str, Any]], state: Path, memory_bytes: int) -> Config:
    """What can be made of the values, defaults standing in for those that could not be read."""
    tables = {name: values.get((name, 0), {}) for name in SINGLE_TABLES}
    tables["hot"].setdefault("size_bytes", default_hot_bytes(memory_bytes))
    tables["limits"].setdefault(
        "block_bytes_max", default_block_bytes_max(tables["hot"]["size_bytes"])
    )
    if "operation_deadline_ns" not in tables["limits"]:
        hot, limits = HotConfig(**tables["hot"]), Limits(**tables["limits"])
        tables["limits"]["operation_deadline_ns"] = default_operation_deadline_ns(hot, limits)
    devices = [each for (table, _), each in sorted(values.items()) if table == "cold"]
    return Config(
        cold=tuple(ColdConfig(**each) for each in devices if "path" in each),
        **{"state": state, **values.get(("", 0), {})},
        **{name: SINGLE_TABLES[name](**each) for name, each in tables.items()},
    )
