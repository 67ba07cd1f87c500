"""Which channel is chosen, and why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mountd import channels

FULL = "CapEff:\t000001ffffffffff\n"
NONE = "CapEff:\t00000000a80425fb\n"


def proc(base: Path, status: str = FULL, uid_map: str = "0 0 4294967295\n") -> Path:
    (base / "status").write_text(f"Name:\tx\n{status}")
    (base / "uid_map").write_text(uid_map)
    return base


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@pytest.mark.parametrize("release", ["6.9.0", "6.18.44-fc", "7.3.4-arch1", "10.0"])
def test_kernels_from_6_9_on_have_passthrough(release: str) -> None:
    assert channels.kernel_is_old(release) is None


@pytest.mark.parametrize("release", ["6.8.12-generic", "5.15.0", "4.18"])
def test_older_kernels_are_named_as_the_reason(release: str) -> None:
    told = channels.kernel_is_old(release)
    assert told is not None
    assert "6.9" in told


@pytest.mark.usefixtures("as_root")
def test_root_with_all_rights_lacks_nothing(tmp_path: Path) -> None:
    assert channels.what_root_lacks(proc(tmp_path)) is None


@pytest.mark.usefixtures("as_root")
def test_root_of_a_container_lacks_the_right_to_mount(tmp_path: Path) -> None:
    assert channels.what_root_lacks(proc(tmp_path, NONE)) == "root without CAP_SYS_ADMIN"


@pytest.mark.usefixtures("as_root")
def test_root_of_a_user_namespace_is_not_the_machines(tmp_path: Path) -> None:
    told = channels.what_root_lacks(proc(tmp_path, uid_map="0 1000 1\n"))
    assert told == "root of a user namespace only"


def test_an_ordinary_user_gets_pyfuse3_unless_asked_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    chosen = channels.choose("auto")
    assert (chosen.name, chosen.why) == ("pyfuse3", "not root")
    forced = channels.choose("direct")
    assert (forced.name, forced.why, forced.privileged) == ("direct", "asked for", False)


def test_what_is_asked_for_is_chosen_anywhere() -> None:
    assert channels.choose("pyfuse3").name == "pyfuse3"
    assert channels.choose("direct").name == "direct"
