"""`ctx-mountd` and `mount.ctxfs`: arguments, the line when the mount answers, and errors."""

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import ctxfs
from ctxfs.config import ColdConfig, Config, HotConfig, MountConfig, load
from ctxfs.errors import ConfigError, DeviceLost, TierFull
from ctxfs.units import GIB, MIB
from mountd import check, cli, mounthelper, options
from mountd.options import allow_other, may_allow_other, parse_options

Serve = Callable[[Config, Callable[[], None], int | None], int]


ALONE = ["--channel=pyfuse3"]  # with no parent: what is served by runs in this process


@pytest.fixture(autouse=True)
def _machine_with_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is mounted here: what the machine lacks for it is no matter."""
    monkeypatch.setattr(check, "_fuse", lambda config: iter(()))


@pytest.fixture(autouse=True)
def _logs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mountd.logs.setup", lambda config: None)


@pytest.fixture
def point(tmp_path: Path) -> Path:
    path = tmp_path / "mount"
    path.mkdir()
    return path


@pytest.fixture
def state(tmp_path: Path) -> str:
    return f"--state={tmp_path / 'state'}"


def configured(*arguments: str) -> Config:
    return cli.configure(cli.parser().parse_args(arguments))


def serve_by(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    """Puts `serve` in the place of the real daemon."""
    module = types.ModuleType("mountd.run")
    module.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mountd.run", module)


def test_flags_become_the_configuration(point: Path, tmp_path: Path) -> None:
    config = configured(
        "--state=" + str(tmp_path / "s"),
        "--hot=64MiB",
        "--warm=0",
        f"--cold={tmp_path}/a:32MiB",
        f"--cold={tmp_path}/b:1G",
        "--format",
        "--channel=pyfuse3",
        "--log-format=json",
        "--log-level=debug",
        "-o",
        "rw,allow_other,fsname=kv",
        "-o",
        "x-systemd.automount,_netdev",
        str(point),
    )
    assert config.state == tmp_path / "s"
    assert config.hot.size_bytes == 64 * MIB
    assert config.cold == (
        ColdConfig(path=tmp_path / "a", size_bytes=32 * MIB, format=True),
        ColdConfig(path=tmp_path / "b", size_bytes=GIB, format=True),
    )
    assert config.mount == MountConfig(path=point, channel="pyfuse3", allow_other=True, fsname="kv")
    assert (config.log.format, config.log.level) == ("json", "debug")


def test_a_cold_path_may_contain_a_colon(point: Path, tmp_path: Path, state: str) -> None:
    device = tmp_path / "pci-0000:01"
    device.write_bytes(b"")
    os.truncate(device, 16 * MIB)
    directory = tmp_path / "a:b"
    directory.mkdir()
    config = configured(state, f"--cold={device}", f"--cold={directory}/c:16MiB", str(point))
    assert [(each.path, each.size_bytes) for each in config.cold] == [
        (device, None),
        (directory / "c", 16 * MIB),
    ]


def test_everything_wrong_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = cli.main(["--hot=7", "--warm=1M", "-o", "ro,zap", f"--cold={tmp_path}/c:x", "/c"])
    assert status == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["ctx-mountd", "-o ro"],
        ["ctx-mountd", "-o zap"],
        ["ctx-mountd", "--cold"],
        ["ctx-mountd", "--warm"],
        ["ctx-mountd", "--hot"],
    ]


def test_an_unknown_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--hott=1G", "/ctx"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "ctx-mountd: unrecognized arguments: --hott=1G; try ctx-mountd --help"


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["-V"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"ctx-mountd {ctxfs.__version__}\n"


def test_check_prints_a_configuration_that_reads_back(
    point: Path, tmp_path: Path, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [state, "--hot=64MiB", f"--cold={tmp_path}/c:16MiB", str(point)]
    assert cli.main(["--check", *arguments]) == 0
    path = tmp_path / "out.toml"
    path.write_text(capsys.readouterr().out)
    again = load(path, state=tmp_path, memory_bytes=GIB)
    assert again.as_dict() == configured(*arguments).as_dict()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mount", "out.toml"]


def test_check_finds_what_starting_would(
    tmp_path: Path, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--check", "--format", state, str(tmp_path / "none")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "the mount point does not exist" in first
    assert second == "ctx-mountd: --format: there is no cold device to format"


def test_one_line_is_printed_when_the_mount_answers(
    point: Path,
    tmp_path: Path,
    state: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr("mountd.systemd.ready", told.append)

    def serve(config: Config, ready: Callable[[], None], fuse_fd: int | None) -> int:
        assert (tmp_path / "state" / "daemon.pid").read_text() == f"{os.getpid()}\n"
        assert capsys.readouterr().out == ""
        ready()
        return 0

    serve_by(monkeypatch, serve)
    arguments = [state, "--hot=64MiB", f"--cold={tmp_path}/c:1GiB", "--channel=pyfuse3"]
    assert cli.main([*arguments, str(point)]) == 0
    assert capsys.readouterr().out == (
        f"ctxfs: {point} is mounted (hot 64.0 MiB, cold 1.0 GiB on 1 device, "
        f"channel pyfuse3, pid {os.getpid()})\n"
    )
    assert [line + "\n" for line in told] == [
        f"ctxfs: {point} is mounted (hot 64.0 MiB, cold 1.0 GiB on 1 device, "
        f"channel pyfuse3, pid {os.getpid()})\n"
    ]
    assert not (tmp_path / "state" / "daemon.pid").exists()


def test_the_line_counts_devices(tmp_path: Path) -> None:
    def described(*sizes: int) -> str:
        cold = tuple(ColdConfig(path=tmp_path, size_bytes=size) for size in sizes)
        hot = HotConfig(size_bytes=GIB)
        return cli.describe(Config(state=tmp_path, hot=hot, cold=cold))

    assert ", no cold tier, " in described()
    assert ", cold 3.0 GiB on 2 devices, " in described(GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("error", "status", "lines"),
    [
        (TierFull("no room"), 4, ["no room"]),
        (
            DeviceLost(),
            5,
            ["The medium is gone: a read came back short, or a raw drive says it is full."],
        ),
        (
            ExceptionGroup("", [ExceptionGroup("", [ConfigError("a\nb")]), TierFull("b")]),
            2,
            ["a", "b"],
        ),
        (BaseExceptionGroup("", [KeyboardInterrupt()]), 130, []),
    ],
)
def test_an_expected_error_is_a_line_and_its_status(
    point: Path,
    state: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    status: int,
    lines: list[str],
) -> None:
    def serve(config: Config, ready: Callable[[], None], fuse_fd: int | None) -> int:
        raise error

    serve_by(monkeypatch, serve)
    assert cli.main([*ALONE, state, str(point)]) == status
    assert capsys.readouterr().err.splitlines() == [f"ctx-mountd: {line}" for line in lines]


def test_a_bug_is_not_hidden(point: Path, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(config: Config, ready: Callable[[], None], fuse_fd: int | None) -> int:
        raise ExceptionGroup("", [TierFull("no room"), TypeError("oops")])

    serve_by(monkeypatch, serve)
    with pytest.raises(ExceptionGroup):
        cli.main([*ALONE, state, str(point)])
    assert "TypeError: oops" in cli.explain(TypeError("oops"))


def test_two_daemons_cannot_share_a_state_directory(
    point: Path,
    state: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def serve(config: Config, ready: Callable[[], None], fuse_fd: int | None) -> int:
        return cli.main([*ALONE, state, str(point)])

    serve_by(monkeypatch, serve)
    assert cli.main([*ALONE, state, str(point)]) == 2
    assert f"belongs to the daemon with pid {os.getpid()}" in capsys.readouterr().err


def test_help_starts_nothing_heavy() -> None:
    script = (
        "import sys, mountd.cli\n"
        "mountd.cli.parser().format_help()\n"
        "print([name for name in ('trio', 'pyfuse3', 'liburing', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_options_of_fstab_are_taken_and_others_named() -> None:
    assert parse_options(["rw,noauto,nofail,_netdev,x-y=z,defaults,default_permissions,,"]) == []
    with pytest.raises(ConfigError) as caught:
        parse_options(["ro,allow_other=1"])
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "-o ro",
        "-o allow_other=1",
    ]
    assert parse_options(["ro"], sloppy=True) == []


@pytest.mark.parametrize(
    ("wanted", "uid", "conf", "given"),
    [
        (None, 0, "", True),
        (None, 1000, "", False),
        (None, 1000, "# user_allow_other\n", False),
        (None, 1000, "mount_max = 5\n  user_allow_other  # yes\n", True),
        (True, 0, "", True),
        (True, 1000, "user_allow_other", True),
        (False, 0, "user_allow_other", False),
    ],
)
def test_other_users_are_let_in_where_permitted(
    wanted: bool | None, uid: int, conf: str, given: bool
) -> None:
    assert allow_other(wanted, uid=uid, fuse_conf=conf) is given


def test_allow_other_without_permission_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"user_allow_other into /etc/fuse\.conf"):
        allow_other(True, uid=1000, fuse_conf="#user_allow_other")


def test_a_mount_for_one_user_only_is_said_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(options, "fuse_conf", lambda: "")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with caplog.at_level("INFO"):
        assert not may_allow_other(MountConfig(allow_other=False))
        assert caplog.text == ""
        assert not may_allow_other(MountConfig())
    assert "only this user sees the mount" in caplog.text
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert may_allow_other(MountConfig())


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["none", "/ctx"], ["--daemon", "--", "/ctx"]),
        (["/etc/x.toml", "/ctx", "-o", "rw"], ["--daemon", "-c", "/etc/x.toml", "--", "/ctx"]),
        (["none", "/ctx", "-sfn", "-o", "ro"], ["--check", "--", "/ctx"]),
        (
            ["none", "/ctx", "-o", "rw,allow_other,fsname=kv"],
            ["--daemon", "-o", "allow_other", "-o", "fsname=kv", "--", "/ctx"],
        ),
    ],
)
def test_mount_starts_the_daemon(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], flags: list[str]
) -> None:
    given: list[list[str]] = []

    def main(argv: list[str]) -> int:
        given.append(argv)
        return 7

    monkeypatch.setattr(cli, "main", main)
    assert mounthelper.main(arguments) == 7
    assert given == [flags]


def test_mount_is_quiet_but_when_asked(
    point: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "ctxfs.toml"
    config.write_text("state = 'state'\n[hot]\nsize = '64MiB'")
    assert mounthelper.main([str(config), str(point), "-f"]) == 0
    assert capsys.readouterr().out == ""
    assert mounthelper.main([str(config), str(point), "-fv"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"mount.ctxfs: ctx-mountd --check -c {config} -- {point}\n# read from")


def test_mount_refuses_options_it_cannot_keep(capsys: pytest.CaptureFixture[str]) -> None:
    assert mounthelper.main(["none", "/ctx", "-o", "ro"]) == 2
    assert capsys.readouterr().err.startswith("mount.ctxfs: -o ro: is no option of this mount;")
