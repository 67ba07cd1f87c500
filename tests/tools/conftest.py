"""Running `ctx` in this process, against a directory that looks like a mount."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.tools.fakemount import FakeMount
from tools import ctx


@dataclass(frozen=True)
class Answer:
    """What one run of `ctx` gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Answer]


@pytest.fixture
def mount(tmp_path: Path) -> FakeMount:
    return FakeMount(tmp_path / "ctx")


@pytest.fixture
def run(
    mount: FakeMount, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """`run("ls", "-l")` against the fake mount, from a directory outside it."""
    outside = mount.path.parent / "outside"
    outside.mkdir()
    monkeypatch.chdir(outside)
    monkeypatch.setenv("CTXFS_MOUNT", str(mount.path))

    def call(*words: str) -> Answer:
        capsys.readouterr()
        try:
            code = ctx.main(words)
        except SystemExit as stopped:  # argparse ends by itself on usage errors and help
            code = int(stopped.code or 0)
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return call
