# PYTHON_ARGCOMPLETE_OK
"""`ctx-mountd`: arguments and a file in, a configuration out, and the daemon started with it."""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args

import ctxfs
from ctxfs.config import Channel, Config, LogFormat, LogLevel, Override, load
from ctxfs.errors import ConfigError, CtxfsError
from ctxfs.units import format_size
from mountd import (
    background,
    channels,
    check,
    child,
    drained,
    logs,
    parent,
    replace,
    statedir,
    systemd,
)
from mountd.options import parse_options
from mountd.values import split_device

NAME = "ctx-mountd"


class Parser(argparse.ArgumentParser):
    """Complains in one line, as every other error here."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; try {self.prog} --help\n")


def parser() -> Parser:
    """The flags of `ctx-mountd`, in the order of its manual page."""
    result = Parser(
        prog=NAME,
        allow_abbrev=False,
        description="Mount ctxfs: LLM context as files, on DRAM and NVMe.",
        epilog="Flags beat the configuration file. See ctx-mountd(8) and ctxfs.toml(5).",
    )
    add = result.add_argument
    add("mountpoint", metavar="MOUNTPOINT", nargs="?", help="directory to mount on")
    add("-c", "--config", metavar="FILE", help="configuration file (default: none)")
    add("--state", metavar="DIR", help="what must outlive the process (default: /var/lib/ctxfs)")
    add("--hot", metavar="SIZE", help="room for blocks in DRAM, like 8GiB")
    add("--warm", metavar="SIZE", help="room for compressed blocks in DRAM (none)")
    add(
        "--cold",
        metavar="PATH[:SIZE]",
        action="append",
        help="block device or file to keep blocks on; may be repeated",
    )
    add("--channel", choices=get_args(Channel), help="how the kernel is spoken to (default: auto)")
    add("--format", action="store_true", help="overwrite what somebody else left on a cold device")
    add("--check", action="store_true", help="say what would be done, or what is wrong; do nothing")
    add("--daemon", action="store_true", help="return when the mount answers")
    add(
        "--replace",
        action="store_true",
        help="have a running daemon's work taken over by a new one; needs --state or -c alone",
    )
    add("--log-format", choices=get_args(LogFormat), help="lines for people or for machines")
    add("--log-level", choices=get_args(LogLevel), help="the least that is logged (default: info)")
    add(
        "-o",
        dest="options",
        metavar="OPTIONS",
        action="append",
        default=[],
        help="mount options, comma-separated: allow_other, fsname=NAME, …",
    )
    add("-V", "--version", action="version", version=f"{NAME} {ctxfs.__version__}")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit status; an unexpected error is raised: it is a bug."""
    arguments_parser = parser()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(arguments_parser)
    arguments = arguments_parser.parse_args(argv)
    given = child.taken()
    if given is not None:
        return _answer(arguments, given)
    try:
        if arguments.replace:
            _print_line(replace.replace(_loaded(arguments).state))
            return 0
        config = configure(arguments)
        if arguments.check:
            sys.stdout.write(config.as_toml())
            return 0
        work = partial(start, config, command=command(arguments))
        if arguments.daemon:
            return background.detach(work, explain, config.log.file)
        return work(_print_line)
    except (CtxfsError, BaseExceptionGroup, KeyboardInterrupt) as error:
        reasons = list(leaves(error))
        if any(isinstance(each, KeyboardInterrupt) for each in reasons):
            return 130
        codes = [each.exit_code for each in reasons if isinstance(each, CtxfsError)]
        if len(codes) < len(reasons):
            raise
        sys.stderr.write(explain(error) + "\n")
        return codes[0]


def _answer(arguments: argparse.Namespace, given: child.Child) -> int:
    """Be the process that answers. Why it does not come to that, the parent tells."""
    try:
        config = configure(arguments, given)
        # All code, before the process that answers now is ended.
        importlib.import_module("mountd.run")
        importlib.import_module("mountd.channel_direct")
        given.wait_for_turn()
        return serve(config, given.announce, given.fuse_fd)
    except (Exception, BaseExceptionGroup, KeyboardInterrupt) as error:
        reasons = list(leaves(error))
        if any(isinstance(each, KeyboardInterrupt) for each in reasons):
            return 130
        if not given.explain(explain(error)):
            sys.stderr.write(explain(error) + "\n")
        codes = [each.exit_code for each in reasons if isinstance(each, CtxfsError)]
        return codes[0] if len(codes) == len(reasons) else parent.BUG


def _loaded(arguments: argparse.Namespace) -> Config:
    """The configuration without a look at this machine. Raises ConfigError."""
    source = None if arguments.config is None else Path(os.path.abspath(arguments.config))
    state = statedir.default_state(os.geteuid(), os.environ)
    overrides = [*_overrides(arguments), *parse_options(arguments.options)]
    return load(source, overrides, state=state, memory_bytes=check.memory_bytes())


def configure(arguments: argparse.Namespace, given: child.Child | None = None) -> Config:
    """The configuration these arguments ask for, on this machine.

    A child has some of it from its parent. Raises ConfigError, with everything that is wrong.
    """
    problems: list[str] = []
    overrides = list(_overrides(arguments))
    try:
        overrides += parse_options(arguments.options)
    except ConfigError as error:
        problems.append(str(error))
    source = None if arguments.config is None else Path(os.path.abspath(arguments.config))
    state = statedir.default_state(os.geteuid(), os.environ)
    try:
        config = load(source, overrides, state=state, memory_bytes=check.memory_bytes())
    except ConfigError as error:
        raise ConfigError("\n".join([*problems, str(error)])) from None
    if given is not None:
        config = given.placed(config)
    # Where our own mount is, nothing is in the way, and nobody may answer just now.
    is_ours = given is not None or (systemd.keeps() and _is_supervised(config))
    problems += check.problems(config, mounted=is_ours)
    if arguments.format and not config.cold:
        problems.append("--format: there is no cold device to format")
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def start(config: Config, announce: background.Announce, *, command: Sequence[str]) -> int:
    """Keep the mount until it is ended; `announce` hears once that it answers.

    `command` is what a parent has its children run.
    """
    if _is_supervised(config):
        assert config.mount.path is not None  # checked by `configure`
        logs.setup(config.log)
        log_name = "its standard error" if config.log.file is None else str(config.log.file)
        return parent.supervise(
            command,
            point=config.mount.path,
            state=config.state,
            announce=announce,
            log_name=log_name,
        )

    def ready(line: str) -> None:
        announce(line)
        systemd.ready(line)

    return serve(config, ready)


def _is_supervised(config: Config) -> bool:
    """Whether a parent holds the mount: who opens /dev/fuse without help may hand it on.

    Only a kernel that has passthrough repeats what a daemon that died had not answered.
    """
    chosen = channels.choose(config.mount.channel)
    is_new = channels.kernel_is_old(os.uname().release) is None
    return chosen.name == channels.DIRECT and chosen.privileged and is_new


def serve(config: Config, announce: background.Announce, fuse_fd: int | None = None) -> int:
    """Answer the mount until it is ended. Claims the state directory."""
    # Here, not above: the kernel channel and the rings are not for --help, --check or the
    # process that only waits for the daemon.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's: no matrices are multiplied here
    from mountd import run

    logs.setup(config.log)
    with statedir.claim(config.state):
        return run.serve(config, lambda: announce(describe(config)), fuse_fd)


def command(arguments: argparse.Namespace) -> list[str]:
    """The command that does the same as a parent's child. Paths are absolute in it.

    The package is found as this one was, and never in the directory of whoever started it.
    """
    words = [sys.executable, "-P", "-m", "mountd.cli"]
    words += [
        f"--{name}={_absolute(value)}"
        for name in ("config", "state")
        if (value := getattr(arguments, name)) is not None
    ]
    for each in arguments.cold or ():
        device = _device(each)
        words.append("--cold=" + ":".join(str(device[k]) for k in ("path", "size") if k in device))
    words += [
        f"--{name.replace('_', '-')}={value}"
        for name in ("hot", "warm", "channel", "log_format", "log_level")
        if (value := getattr(arguments, name)) is not None
    ]
    words += ["--format"] * arguments.format
    words += [f"-o{each}" for each in arguments.options]
    return (
        words if arguments.mountpoint is None else [*words, "--", _absolute(arguments.mountpoint)]
    )


def describe(config: Config) -> str:
    """The line that says the mount answers."""
    cold = "no cold tier"
    if config.cold:
        used = drained.present(config.cold, config.state)
        devices = "1 device" if len(used) == 1 else f"{len(used)} devices"
        size = sum(check.cold_bytes(device) for device in used)
        cold = f"cold {format_size(size)} on {devices}"
    channel = channels.choose(config.mount.channel).name
    hot = format_size(config.hot.size_bytes)
    warm_bytes = config.warm.size_bytes
    warm = f"warm {format_size(warm_bytes)}, " if warm_bytes else ""
    return (
        f"ctxfs: {config.mount.path} is mounted "
        f"(hot {hot}, {warm}{cold}, channel {channel}, pid {os.getpid()})"
    )


def explain(error: BaseException) -> str:
    """What went wrong, a line each with the command's name in front; of a bug, all there is."""
    if isinstance(error, parent.ChildFailed):
        return str(error)  # finished, by the child
    reasons = list(leaves(error))
    if not all(isinstance(each, CtxfsError) for each in reasons):
        return "".join(traceback.format_exception(error)).rstrip()
    texts = (str(each) or str(type(each).__doc__).partition("\n")[0] for each in reasons)
    lines = dict.fromkeys(line for text in texts for line in text.splitlines())
    return "\n".join(f"{NAME}: {line}" for line in lines)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors inside a tree of exception groups."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves(each)
    else:
        yield error


def _overrides(arguments: argparse.Namespace) -> Iterator[Override]:
    """What the flags say. Paths are made absolute: a daemon works in another directory."""
    if arguments.mountpoint is not None:
        yield Override("MOUNTPOINT", "mount", "path", _absolute(arguments.mountpoint))
    if arguments.state is not None:
        yield Override("--state", "", "state", _absolute(arguments.state))
    if arguments.cold:
        yield Override("--cold", "cold", "", [_device(text) for text in arguments.cold])
    if arguments.format:
        yield Override("--format", "cold", "format", True)
    for flag, table, key in (
        ("hot", "hot", "size"),
        ("warm", "warm", "size"),
        ("channel", "mount", "channel"),
        ("log_format", "log", "format"),
        ("log_level", "log", "level"),
    ):
        if (value := getattr(arguments, flag)) is not None:
            yield Override(f"--{flag.replace('_', '-')}", table, key, value)


def _device(text: str) -> dict[str, Any]:
    """One `--cold PATH[:SIZE]`."""
    path, size = split_device(text)
    return {"path": _absolute(path)} | ({"size": size} if size is not None else {})


def _absolute(text: str) -> str:
    return os.path.abspath(text) if text else text


def _print_line(line: str) -> None:
    with suppress(BrokenPipeError):  # nobody listens any more: no reason not to serve
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
