"""Each manual page against its parser, both ways."""

import argparse
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ctxfs import xattrs
from tools import ctx

MAN = Path(__file__).parents[2] / "man"
PAGES = sorted([*MAN.glob("ctx.1"), *MAN.glob("ctx-*.1"), MAN / "ctxfs.7"])


def _sub_parsers() -> dict[str, argparse.ArgumentParser]:
    for action in ctx.parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise AssertionError("ctx has no sub-commands")


COMMANDS = _sub_parsers()
PARSERS = {"ctx": ctx.parser()} | {f"ctx-{name}": each for name, each in COMMANDS.items()}


def _page(name: str) -> str:
    return (MAN / f"{name}.1").read_text(encoding="utf-8")


def _section(page: str, title: str) -> str:
    return page.split(f".Sh {title}\n", 1)[1].split("\n.Sh ", 1)[0]


def _flags(text: str) -> set[str]:
    return {f"-{flag}" for flag in re.findall(r"\bFl (\S+)", text)}


def _option_strings(parser: argparse.ArgumentParser) -> set[str]:
    return {string for action in parser._actions for string in action.option_strings}


@pytest.mark.parametrize("name", PARSERS)
def test_options_in_the_page_are_those_of_the_parser(name: str) -> None:
    documented = _flags("\n".join(re.findall(r"^\.It (Fl .*)$", _page(name), re.MULTILINE)))
    assert documented == _option_strings(PARSERS[name])


@pytest.mark.parametrize("name", PARSERS)
def test_synopsis_shows_each_option_once(name: str) -> None:
    shown = _flags(_section(_page(name), "SYNOPSIS"))
    actions = [set(action.option_strings) for action in PARSERS[name]._actions]
    assert all(len(strings & shown) == 1 for strings in actions if strings)
    assert shown <= _option_strings(PARSERS[name])


@pytest.mark.parametrize("name", COMMANDS)
def test_synopsis_has_the_operands_of_the_usage_line(name: str) -> None:
    words = set(re.findall(r"\b[A-Z]{2,}\b|\bK\b|\bN\b", COMMANDS[name].format_usage()))
    lines = _section(_page(f"ctx-{name}"), "SYNOPSIS").splitlines()
    shown = {word for line in lines for word in re.findall(r"\bAr (\w+)", line)}
    assert shown == words


@pytest.mark.parametrize("name", COMMANDS)
def test_page_names_every_choice(name: str) -> None:
    text = _page(f"ctx-{name}")
    for action in COMMANDS[name]._actions:
        for choice in action.choices or ():
            assert re.search(rf"\b{choice}\b", text), choice


def test_main_page_lists_every_command_and_no_other() -> None:
    listed = re.findall(r"^\.It Cm (\S+)$", _page("ctx"), re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)
    assert {page.stem for page in MAN.glob("ctx-*.1")} == {f"ctx-{name}" for name in COMMANDS}


def test_exit_codes_in_the_main_page_are_those_that_happen() -> None:
    from tools import _common

    documented = {int(n) for n in re.findall(r"^\.It (\d+)$", _page("ctx"), re.MULTILINE)}
    assert documented == {
        _common.OK,
        _common.FAILED,
        _common.USAGE,
        _common.INTERRUPTED,
        _common.PIPE_CLOSED,
    } | {answer.exit_code for answer in _common.ANSWERS.values()}


def test_ideas_page_lists_every_attribute_and_no_other() -> None:
    text = _section((MAN / "ctxfs.7").read_text(encoding="utf-8"), "EXTENDED ATTRIBUTES")
    listed = set(re.findall(r"^\.It Li (\w+) Pq (\w+)$", text, re.MULTILINE))
    names = xattrs.BLOCK_WRITABLE | xattrs.BLOCK_READ_ONLY | xattrs.DIRECTORY_WRITABLE
    assert {name for name, _ in listed} == {
        name.removeprefix(xattrs.PREFIX).decode() for name in names
    }
    for name, access in listed:
        writable = xattrs.BLOCK_WRITABLE | xattrs.DIRECTORY_WRITABLE
        assert ("w" in access) == (xattrs.PREFIX + name.encode() in writable), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_is_clean_mdoc(page: Path) -> None:
    groff = shutil.which("groff")
    assert groff, "groff is needed to check the pages: apt install groff"
    done = subprocess.run([groff, "-mdoc", "-ww", "-z", page], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_every_argument_is(name: str) -> None:
    parser = COMMANDS[name]
    assert all(action.help for action in parser._actions)
    assert f"ctx {name}" in parser.format_help()
