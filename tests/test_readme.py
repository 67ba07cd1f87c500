"""What README.md and docs/ tell people to type exists, and what they link to is there."""

import contextlib
import io
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxfs.config import load
from ctxfs.units import GIB
from mountd import cli
from tests.sources import ROOT
from tools import ctx
from tools.mount import daemon_command

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "bench/README.md"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def fenced(page: Path, language: str) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    yield from re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def command_lines() -> list[tuple[str, str]]:
    """Page and command, of all that a reader is to type; continued lines are one."""
    blocks = [(page.name, block) for page in PAGES for block in fenced(page, "sh")]
    return [
        (name, line)
        for name, block in blocks
        for line in block.replace("\\\n", " ").splitlines()
        if line and not line.startswith((" ", "#"))
    ]


def words_of(program: str) -> list[list[str]]:
    """The arguments of every call of this program."""
    calls = []
    for _, line in command_lines():
        if line.split()[0] == program:
            calls.append(shlex.split(line, comments=True)[1:])
    return calls


def headings(page: Path) -> set[str]:
    """The anchors that a page has, as they are made of headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_the_two_commands_come_first() -> None:
    lines = [line for page, line in command_lines() if page == "README.md"]
    assert lines[:2] == ["make demo", "make test"]


def test_every_make_target_that_is_named_exists() -> None:
    named = {words[0] for words in words_of("make")}
    for page in PAGES:
        named |= set(re.findall(r"`make ([a-z-]+)`", page.read_text(encoding="utf-8")))
    assert named
    assert named <= TARGETS


def test_every_target_says_what_it_does() -> None:
    described = set(re.findall(r"^([a-z-]+):.*## \S", MAKEFILE, re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: (help .*)$", MAKEFILE, re.MULTILINE)
    assert described == set(phony.split())


@pytest.mark.parametrize("words", words_of("ctx"), ids=shlex.join)
def test_a_call_of_ctx_is_understood(words: list[str]) -> None:
    arguments = ctx.parser().parse_args(words)
    assert arguments.command
    if arguments.command == "mount":
        _, flags = daemon_command([arguments.first, *arguments.rest])
        cli.parser().parse_args(flags)


@pytest.mark.parametrize("words", words_of("ctx-mountd"), ids=shlex.join)
def test_a_call_of_the_daemon_is_understood(words: list[str]) -> None:
    cli.parser().parse_args(words)


def test_every_command_in_running_text_exists() -> None:
    commands = set(re.findall(r"^    (\w+) ", ctx.parser().format_help(), re.MULTILINE))
    for page in PAGES:
        for name in re.findall(r"`ctx ([a-z]+)", page.read_text(encoding="utf-8")):
            assert name in commands, f"{page.name}: ctx {name}"


def test_configurations_are_accepted(tmp_path: Path) -> None:
    for page in PAGES:
        for number, block in enumerate(fenced(page, "toml")):
            tomllib.loads(block)
            path = tmp_path / f"{page.stem}{number}.toml"
            path.write_text(block, encoding="utf-8")
            load(path, state=tmp_path, memory_bytes=256 * GIB)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_copied_or_named_in_the_checkout_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w/.])((?:deploy|docs|tests|man|scripts)/[\w./@-]*\w)", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("page", sorted((ROOT / "man").glob("ctx*.1")), ids=lambda p: p.stem)
def test_help_of_every_page_can_be_called(page: Path) -> None:
    words = page.stem.split("-")[1:]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        ctx.main([*words, "--help"])
    assert ended.value.code == os.EX_OK
    assert page.stem.replace("-", " ") in out.getvalue()
