"""The daemon's manual pages and examples say what its parsers and settings say, both ways."""

import argparse
import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ctxfs.config import load, reread
from ctxfs.settings import TABLES, Config, Limits, settings_of
from ctxfs.units import GIB, SECOND_NS
from mountd import cli, mounthelper

ROOT = Path(__file__).parent.parent
MAN = ROOT / "man"
PAGES = ("ctx-mountd.8", "mount.ctxfs.8", "ctxfs.toml.5")


def flags_of_page(name: str) -> set[str]:
    """What follows `Fl` in the list of options."""
    text = (MAN / name).read_text()
    found: set[str] = set()
    for line in re.findall(r"^\.It (Fl .*)$", text, re.MULTILINE):
        found |= {f"-{flag}" for flag in re.findall(r"\bFl (\S+)", line)}
    return found


def flags_of_synopsis(name: str) -> set[str]:
    """As above, for the synopsis; there, one `Fl` may join several letters."""
    text = (MAN / name).read_text().partition(".Sh SYNOPSIS")[2].partition(".Sh ")[0]
    found: set[str] = set()
    for flag in re.findall(r"\bFl (\S+)", text):
        found |= {f"-{flag}"} if flag[0] == "-" else {f"-{letter}" for letter in flag}
    return found


def flags_of(parser: argparse.ArgumentParser) -> list[list[str]]:
    return [list(action.option_strings) for action in parser._actions if action.option_strings]


@pytest.mark.parametrize(
    ("page", "parser"),
    [("ctx-mountd.8", cli.parser()), ("mount.ctxfs.8", mounthelper.parser())],
    ids=["ctx-mountd", "mount.ctxfs"],
)
def test_a_page_lists_exactly_the_flags_of_its_program(
    page: str, parser: argparse.ArgumentParser
) -> None:
    known = {flag for each in flags_of(parser) for flag in each}
    assert flags_of_page(page) == known
    shown = flags_of_synopsis(page)
    assert shown <= known
    assert all(shown & set(each) for each in flags_of(parser))


@pytest.mark.parametrize(
    ("page", "parser"),
    [("ctx-mountd.8", cli.parser()), ("mount.ctxfs.8", mounthelper.parser())],
    ids=["ctx-mountd", "mount.ctxfs"],
)
def test_a_page_names_each_argument_as_help_does(
    page: str, parser: argparse.ArgumentParser
) -> None:
    text = (MAN / page).read_text()
    for action in parser._actions:
        if action.metavar is not None and not action.option_strings:
            assert f"Ar {action.metavar}" in text
        for choice in action.choices or ():
            assert f".Cm {choice}" in text


def keys_of_page() -> dict[str, dict[str, bool]]:
    """Table, key, and whether it is marked as reread."""
    tables: dict[str, dict[str, bool]] = {}
    for section in (MAN / "ctxfs.toml.5").read_text().split(".Ss ")[1:]:
        title, _, text = section.partition("\n")
        found = re.findall(r"^\.It Ic (\w+) No = (.*)$", text, re.MULTILINE)
        tables[title] = {key: "Pq reread" in rest for key, rest in found}
    return tables


def test_the_page_lists_exactly_the_keys_that_are_read() -> None:
    expected = {
        f"[[{name}]]" if name == "cold" else f"[{name}]": {
            setting.key: setting.reread for _, setting in settings_of(table)
        }
        for name, table in TABLES.items()
    }
    expected["Top level"] = {setting.key: setting.reread for _, setting in settings_of(Config)}
    assert keys_of_page() == expected


def test_the_page_names_each_word_that_a_key_accepts() -> None:
    text = (MAN / "ctxfs.toml.5").read_text()
    for table in TABLES.values():
        for _, setting in settings_of(table):
            shown = re.findall(rf"^\.It Ic {setting.key} No = (.*)$", text, re.MULTILINE)
            words = [re.findall(r"\\\(dq(\w+)\\\(dq", each) for each in shown]
            assert not setting.kind.words or sorted(setting.kind.words) in map(sorted, words)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_a_page_is_clean_mdoc(page: str) -> None:
    command = ["groff", "-mdoc", "-ww", "-z", str(MAN / page)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_the_example_configuration_is_accepted() -> None:
    config = load(ROOT / "deploy/ctxfs.toml", state=Path("/s"), memory_bytes=64 * GIB)
    assert config.mount.path == Path("/ctx")
    assert reread(config, memory_bytes=64 * GIB) == (config, [])


def test_the_example_of_the_page_is_accepted(tmp_path: Path) -> None:
    text = (MAN / "ctxfs.toml.5").read_text()
    (example,) = re.findall(r"^\.Bd -literal.*?\n(.*?)^\.Ed", text, re.MULTILINE | re.DOTALL)
    path = tmp_path / "ctxfs.toml"
    path.write_text(example)
    load(path, state=Path("/s"), memory_bytes=256 * GIB)


UNITS = ("ctxfs.service", "ctxfs@.service")


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_waits_longer_than_the_daemon_drains(unit: str) -> None:
    settings = configparser.ConfigParser(strict=False, interpolation=None)
    settings.read(ROOT / "deploy" / unit)
    service = settings["Service"]
    assert service["Type"] == "notify"
    assert int(service["TimeoutStopSec"]) * SECOND_NS > Limits().drain_ns
    # The parent is told alone, and its descriptor outlives it.
    assert (service["KillMode"], service["Restart"]) == ("mixed", "on-failure")
    assert int(service["FileDescriptorStoreMax"]) >= 1
    program, *arguments = service["ExecStart"].split()
    assert program.endswith("/ctx-mountd")
    cli.parser().parse_args(arguments)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_a_unit_is_understood_by_systemd(unit: str, tmp_path: Path) -> None:
    text = (ROOT / "deploy" / unit).read_text()
    # Neither the program nor its pages are installed where the tests run.
    text = re.sub(r"^Documentation=.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(ExecStart)=\S+", r"\1=/bin/true", text, flags=re.MULTILINE)
    path = tmp_path / unit.replace("@", "@instance")
    path.write_text(text)
    command = ["systemd-analyze", "verify", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
