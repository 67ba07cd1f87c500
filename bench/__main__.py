"""`python -m bench`: what the mount costs and gives, beside what else there is."""

import argparse
import json
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import codec, commands, places, profile, remote, rounds
from bench.daemon import DaemonFailed
from bench.fio import FioFailed
from bench.memory import NoStatistics
from bench.network import NoNetwork
from ctxfs.errors import BadValue
from ctxfs.units import parse_size

RESULTS = Path(__file__).parent / "results"
PAGE = 4096
TROUBLES = (ValueError, DaemonFailed, NoStatistics, NoNetwork, FioFailed, OSError)
COLUMNS_MIN = 130  # of the tables, where the output is no terminal


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure a ctxfs mount beside plain tmpfs, the local file system and fio. "
        "Instead, `python -m bench memory` measures the daemon's memory for each block, "
        "`python -m bench profile` where the time of an open goes, `python -m bench codec` the "
        "size and speed of compressed blocks, `python -m bench mount` how long a mount with many "
        "cold blocks takes to answer, `python -m bench cluster` blocks on other hosts.",
        epilog=f"Measures: {', '.join(rounds.names())}.",
    )
    parser.add_argument("--size", type=block_size, default="2MiB", help="of a block (%(default)s)")
    _number(parser, "--blocks", 64, "in each place")
    _rounds(parser)
    parser.add_argument("--no-fio", action="store_true", help="leave fio out")
    parser.add_argument(
        "--channel",
        nargs="+",
        choices=places.CHANNELS,
        metavar="NAME",
        help="of the own daemon: direct, pyfuse3; with both, there are two daemons, side by side",
    )
    _common(parser)
    return parser


def _rounds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.3,
        metavar="S",
        help="at least, for each measure in each place in each round (%(default)s)",
    )
    _number(parser, "--rounds", 5, "medians are taken over them")
    parser.add_argument(
        "--only",
        type=_names,
        default=[],
        metavar="NAME,…",
        help="measures that begin like this, as in `put,get` (all of them)",
    )


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def memory_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench memory",
        description="Make many small blocks and see how much memory the daemon takes for each.",
    )
    _number(parser, "--blocks", 100_000, "to make")
    parser.add_argument(
        "--bytes", type=int, choices=(0, 1), default=0, help="in each (%(default)s)"
    )
    _number(parser, "--each", 0, "blocks in a directory; 0: all in one")
    _one_channel(parser)
    _common(parser)
    return parser


def profile_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench profile",
        description="Open and close one hot block again and again through the direct channel, and "
        "see where the time goes: requests by kind, with the time in the daemon of each, and "
        "the functions that take it.",
    )
    _number(parser, "--opens", 20_000, "that are timed")
    _number(parser, "--functions", 20, "of the daemon to show, by their own time")
    parser.add_argument("--size", type=size, default="2MiB", help="of the block (%(default)s)")
    _where_to(parser)
    return parser


def codec_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench codec",
        description="Encode and decode blocks of K and V: the codec, plain zstd and, where it is "
        "installed, zipnn. Without files, the demo's model computes some, in bf16 and fp16.",
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="a block each; what is behind the last dot of the name is its dtype",
    )
    _number(parser, "--tokens", 8192, "of text for the demo's model")
    _number(parser, "--rounds", 5, "medians are taken over them")
    _number(parser, "--threads", 2, "for a way of ours that shares a block out; 1: leave it out")
    _where_to(parser)
    return parser


def mount_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench mount",
        description="Make a cold file with many small blocks, 4 to 16 KiB, and see how long a "
        "mount takes from the start of the daemon until it answers: with the checkpoint and the "
        "summaries that are in the file, and without, from the records alone.",
    )
    _number(parser, "--blocks", 100_000, "to make; a million take 18 GB")
    _one_channel(parser)
    _where_to(parser)
    return parser


def cluster_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench cluster",
        description="As root: get blocks that lie on another host, and put them on two, by daemons "
        "on hosts that are network namespaces of this machine; beside iperf3 with as many "
        "connections, Redis, and Mooncake's store, where these are installed.",
        epilog=f"Measures: {', '.join(remote.names())}.",
    )
    parser.add_argument("--size", type=block_size, default="2MiB", help="of a block (%(default)s)")
    _number(parser, "--blocks", 32, "in each pass")
    _number(parser, "--connections", 4, "from each member to each other one, and of iperf3")
    parser.add_argument(
        "--link",
        type=float,
        metavar="GBIT",
        help="speed of each host's link, in Gbit/s (as fast as the processors are)",
    )
    _rounds(parser)
    parser.add_argument(
        "--rivals",
        type=_names,
        default=list(remote.RIVALS),
        metavar="NAME,…",
        help=f"what to compare with, of: {','.join(remote.RIVALS)} (all of them)",
    )
    _one_channel(parser)
    _where_to(parser)
    return parser


def _one_channel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--channel",
        nargs=1,
        choices=places.CHANNELS,
        metavar="NAME",
        help="of the own daemon: direct, pyfuse3",
    )


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mount", type=Path, metavar="DIR", help="this mount, no own daemon")
    parser.add_argument("--hot", type=size, metavar="SIZE", help="its hot tier (what is needed)")
    parser.add_argument("--cold", type=size, metavar="SIZE", help="its cold file (what is needed)")
    _where_to(parser)


def _where_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("/var/tmp"),
        metavar="DIR",
        help="where the cold file lies, and the local files to compare with (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="instead of bench/results/…")


def _number(parser: argparse.ArgumentParser, name: str, default: int, what: str) -> None:
    parser.add_argument(
        name,
        type=positive if default else natural,
        default=default,
        metavar="N",
        help=f"{what} ({default})",
    )


def size(text: str) -> int:
    try:
        return parse_size(text)
    except BadValue as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def block_size(text: str) -> int:
    """A size that O_DIRECT takes, and fio with it."""
    number = size(text)
    if number < PAGE or number % PAGE:
        raise argparse.ArgumentTypeError(f"a block here is a multiple of {PAGE} bytes")
    return number


def natural(text: str) -> int:
    """A whole number from 0."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError("at least 0")
    return number


def positive(text: str) -> int:
    """A whole number from 1."""
    if (number := natural(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def save(name: str, options: argparse.Namespace, found: dict[str, Any], out: Console) -> None:
    """Write the JSON, with the settings that led to it."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    path = options.json or RESULTS / f"{now}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    text = json.dumps({"settings": settings, **found}, indent=1, default=str)
    path.write_text(text + "\n", encoding="utf-8")
    out.print(f"Written to {path}.")


def console() -> Console:
    out = Console(highlight=False, soft_wrap=True)
    if not out.is_terminal:
        out.width = max(out.width, COLUMNS_MIN)
    return out


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    out = console()
    commands_by_name = {
        "cluster": (cluster_parser, remote.remote_blocks),
        "codec": (codec_parser, codec.codec),
        "memory": (memory_parser, commands.memory_per_block),
        "profile": (profile_parser, profile.where_an_open_goes),
        "mount": (mount_parser, commands.mount_with_many_blocks),
    }
    name = given[0] if given and given[0] in commands_by_name else "places"
    make_parser, command = commands_by_name.get(name, (parser, commands.side_by_side))
    options = make_parser().parse_args(given if name == "places" else given[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        found = command(options, out)
    except TROUBLES as error:
        out.print(f"bench: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        out.print("Interrupted; what it made is removed.")
        return 128 + signal.SIGINT
    save(name, options, found, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
