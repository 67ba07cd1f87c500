"""Who may import whom: the drawing in docs/architecture.md, held against the imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT, Source, sources

SHIPPED = tuple(source for source in sources() if source.package != "tests")
PURE = ("ctxfs.core", "ctxfs.ondisk", "ctxfs.codec", "ctxfs.wire", "mountd.fuseproto")
# Contracts look only at direct names of the standard library; here, the clock and the process too.
IMPURE = {"asyncio", "io", "liburing", "os", "pathlib", "pyfuse3", "pyverbs", "random", "select"}
IMPURE |= {"socket", "subprocess", "threading", "time", "trio", "uuid"}
TOOLS_MAY_IMPORT = {"ctxfs", "ctxfs.errors", "ctxfs.units", "ctxfs.xattrs"}
# For devices that nobody has mounted, so that there is no mount to use.
OFFLINE_TOOLS_MAY_IMPORT = {
    ("tools.dump", "ctxfs.codec.stream"),
    ("tools.dump", "ctxfs.ondisk.describe"),
    ("tools.dump", "ctxfs.ondisk.found"),
    ("tools.fsck", "ctxfs.codec.keyring"),
    ("tools.fsck", "ctxfs.device.keys"),
    ("tools.fsck", "ctxfs.device.reading"),
    ("tools.fsck", "ctxfs.device.threads"),
    ("tools.fsck", "ctxfs.tiers.cold_check"),
    ("tools.fsck", "ctxfs.tiers.cold_faults"),
    ("tools.fsck", "ctxfs.tiers.cold_mend"),
}


def modules_of(source: Source) -> set[str]:
    """Its imports that are modules of ours, without the names taken out of them."""
    ours = {each.name for each in sources()}
    return {name for name in source.imports() if name in ours}


def test_the_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("binding", "adapter"),
    [("pyfuse3", "mountd.channel_pyfuse3"), ("liburing", "ctxfs.device.uring")],
)
def test_a_binding_is_imported_by_its_adapter_alone(binding: str, adapter: str) -> None:
    importers = [each.name for each in SHIPPED if binding in each.imports()]
    assert importers == [adapter]


def test_at_most_one_module_knows_verbs() -> None:
    importers = [
        source.name
        for source in SHIPPED
        if any(name.partition(".")[0] == "pyverbs" for name in source.imports())
    ]
    assert len(importers) <= 1
    assert all(name.startswith("ctxfs.device.") for name in importers)


@pytest.mark.parametrize(
    "source", [each for each in SHIPPED if each.name.startswith(PURE)], ids=str
)
def test_a_pure_module_does_no_io_reads_no_clock_and_runs_no_loop(source: Source) -> None:
    assert not {name.partition(".")[0] for name in source.imports()} & IMPURE
    assert "async def" not in source.text


def test_tools_know_of_the_daemon_only_what_both_must_agree_on() -> None:
    known = {
        (source.name, name)
        for source in SHIPPED
        if source.package == "tools"
        for name in modules_of(source)
        if not name.startswith("tools") and name not in TOOLS_MAY_IMPORT
    }
    assert known == OFFLINE_TOOLS_MAY_IMPORT


def test_tiers_never_see_each_other() -> None:
    tiers = [source for source in SHIPPED if source.name.startswith("ctxfs.tiers.")]
    kinds = {source.name: source.path.stem.partition("_")[0] for source in tiers}
    assert set(kinds.values()) == {"hot", "warm", "cold", "remote"}
    for source in tiers:
        others = {name for name in modules_of(source) if name in kinds}
        assert {kinds[name] for name in others} <= {kinds[source.name]}, source


def test_nobody_imports_the_daemon_but_itself() -> None:
    importers = {
        source.package
        for source in SHIPPED
        if any(name.partition(".")[0] == "mountd" for name in source.imports())
    }
    assert importers == {"mountd"}


def test_the_parent_loads_nothing_of_what_its_child_does() -> None:
    code = "import sys, mountd.cli; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "mountd.parent" in loaded
    assert not loaded & {"trio", "pyfuse3", "liburing", "mountd.run", "mountd.channel_direct"}


def test_every_room_is_in_the_drawing() -> None:
    drawing = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in (ROOT / "ctxfs").glob("*/__init__.py")}
    assert {room for room in rooms if f"ctxfs/{room}" not in drawing} == set()
