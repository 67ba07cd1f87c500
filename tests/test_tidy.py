"""What is agreed about every file of the project, read from the files themselves."""

import ast
import configparser
import io
import re
import shutil
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT, Source, sources

FUNCTION_LINES_MAX = 70
LINE_MAX = 100
MAY_PRINT = {"tools", "bench", "demo"}
MAY_SLEEP = {"tests", "bench", "demo"}
# Written apart, so that this file does not find itself.
LEFTOVERS = re.compile(r"\b(" + "TO" + "DO|FIX" + "ME|XX" + r"X)\b")
SOMEBODYS_PATH = re.compile(r"(?<![\w.])/(work|root|Users|home/(?!u/)\w+)/")  # u is nobody
PROSE = ("*.md", "docs/*.md", "bench/*.md", "man/*", "deploy/**/*", "scripts/*", ".ci/*")
NAMING = (ast.Assign, ast.AnnAssign)
SPEAKING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
TOP_FILES = ("Makefile", "setup.cfg", "pyproject.toml")


def calls(source: Source) -> Iterator[tuple[str, int]]:
    """Dotted names of what is called, where the name is plain, and the line."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno


def comments(source: Source) -> Iterator[tuple[str, int]]:
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string, token.start[0]


def texts() -> Iterator[tuple[str, str]]:
    """Name and content of everything that people wrote."""
    yield from ((str(source), source.text) for source in sources())
    paths = [path for pattern in PROSE for path in ROOT.glob(pattern) if path.is_file()]
    paths += [ROOT / name for name in TOP_FILES]
    for path in paths:
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_functions_fit_on_a_screen() -> None:
    long = [
        f"{source}:{node.lineno} {node.name} has {lines} lines"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_lines_fit_side_by_side() -> None:
    # A word to a checker at the end is not counted, as ruff does not: it cannot be elsewhere.
    wide = [
        f"{source}:{number}"
        for source in sources()
        for number, line in enumerate(source.text.splitlines(), 1)
        if len(re.sub(r"\s*# (type: ignore\[|noqa: ).*", "", line)) > LINE_MAX
    ]
    assert wide == []


def test_nothing_is_left_to_be_done_in_a_comment() -> None:
    left = [f"{name}: {match[0]}" for name, text in texts() for match in LEFTOVERS.finditer(text)]
    assert left == []


def test_no_path_of_somebodys_own_machine_is_written_down() -> None:
    found = [
        f"{name}: {match[0]}" for name, text in texts() for match in SOMEBODYS_PATH.finditer(text)
    ]
    assert found == []


def test_only_programs_for_people_print() -> None:
    printing = [
        f"{source}:{line}"
        for source in sources()
        if source.package not in MAY_PRINT
        for name, line in calls(source)
        if name == "print"
    ]
    assert printing == []


def test_nothing_that_ships_blocks_in_a_sleep() -> None:
    sleeping = [
        f"{source}:{line}"
        for source in sources()
        if source.package not in MAY_SLEEP
        for name, line in calls(source)
        if name in ("time.sleep", "sleep")
    ]
    assert sleeping == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(source)
        for source in sources()
        if source.tree.body and not ast.get_docstring(source.tree)
    ]
    assert silent == []


def lone_texts(tree: ast.AST) -> Iterator[int]:
    """Lines of strings that are statements, but neither a docstring nor said of a name above."""
    for node in ast.walk(tree):
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if not isinstance(statements, list):
                continue
            before: ast.stmt | None = None
            for each in statements:
                is_text = isinstance(each, ast.Expr) and (
                    isinstance(each.value, ast.JoinedStr)
                    or (isinstance(each.value, ast.Constant) and isinstance(each.value.value, str))
                )
                named = node if before is None else before
                documents = isinstance(named, SPEAKING if before is None else NAMING)
                if is_text and not documents:
                    yield each.lineno
                before = each


def test_no_text_is_cut_short_by_the_end_of_a_line() -> None:
    assert list(lone_texts(ast.parse('def f():\n    yield "a"\n    "b"'))) == [3]
    lone = [f"{source}:{line}" for source in sources() for line in lone_texts(source.tree)]
    assert lone == []


def test_a_silenced_checker_is_told_which_complaint() -> None:
    bare = re.compile(r"#\s*(type:\s*ignore|noqa)(?!\[|: ?[A-Z])|#\s*(mypy|ruff): *ignore-errors")
    found = [
        f"{source}:{line}"
        for source in sources()
        for comment, line in comments(source)
        if bare.search(comment)
    ]
    assert found == []


def entry_points() -> set[str]:
    """Modules that are started, not imported."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.entry_points"]["console_scripts"].splitlines()
    return {line.partition("=")[2].partition(":")[0].strip() for line in lines if line}


def test_no_module_is_left_that_nobody_uses() -> None:
    used = entry_points()
    for source in sources():
        used.update(source.imports())
        # `python -m NAME`, and a fake put into sys.modules, name a module in a string.
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value)
    unused = [
        str(source)
        for source in sources()
        if source.name not in used
        and source.path.name not in ("__init__.py", "__main__.py", "conftest.py")
        and not source.path.name.startswith("test_")
    ]
    assert unused == []


def test_every_setting_of_the_project_has_a_file_it_is_about() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for directory, pattern in setup["options.data_files"].items():
        assert list(ROOT.glob(pattern)), directory
    checked = {name.strip() for name in setup["mypy"]["files"].split(",")}
    assert checked == {source.package for source in sources()}


@pytest.mark.parametrize("page", sorted((ROOT / "man").glob("*.[1-8]")), ids=lambda p: p.name)
def test_a_manual_page_is_clean_mdoc(page: Path) -> None:
    groff = shutil.which("groff")
    assert groff, "groff checks the pages: apt-get install groff-base"
    done = subprocess.run(
        [groff, "-mdoc", "-ww", "-z", page], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_script_parses() -> None:
    scripts = [ROOT / ".ci/run", *(ROOT / "scripts").glob("*.sh")]
    for script in scripts:
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script
