"""`python -m demo`: real K and V through a mount, from the first write to the last unmount."""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from bench.daemon import Daemon, DaemonFailed, check_fuse, remove_tree
from demo.blocks import Shelf
from demo.tour import DemoFailed, Tour
from demo.transformer import MODEL_NAME, ModelMissing, load

EXIT_FAILED = 1
EXIT_CANNOT = 2


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="Put the K and V tensors of a real transformer through ctxfs, and check them.",
    )
    parser.add_argument(
        "--mount",
        type=Path,
        metavar="DIR",
        help="use this mount and no daemon of its own, so without the restart. Where DIR is a "
        "plain directory, without tiers and expiry too",
    )
    parser.add_argument("--hot", default="64MiB", metavar="SIZE", help="hot tier (%(default)s)")
    parser.add_argument("--cold", default="512MiB", metavar="SIZE", help="cold file (%(default)s)")
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("/var/tmp"),
        metavar="DIR",
        help="where the temporary directory with the cold file is made (%(default)s)",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave the temporary directory, or with --mount the blocks, for a look at them",
    )
    return parser


@contextlib.contextmanager
def scratch(parent: Path, *, keep: bool, out: Console) -> Iterator[Path]:
    """A temporary directory that goes away in the end, unless it is wanted."""
    path = Path(tempfile.mkdtemp(prefix="ctxfs-demo-", dir=parent))
    try:
        yield path
    finally:
        if keep:
            out.print(f"{path} was kept.")
        else:
            remove_tree(path)


def own_mount(options: argparse.Namespace, out: Console) -> None:
    """Everything, on a daemon that lives as long as the demo."""
    check_fuse()
    with scratch(options.dir, keep=options.keep, out=out) as base:
        mount_point = base / "ctx"
        mount_point.mkdir()
        cold = f"{base / 'cold'}:{options.cold}"
        arguments = ["--hot", options.hot, "--cold", cold]
        daemon = Daemon(mount_point, base / "state", arguments)
        out.print(f"Mounting ctxfs on {mount_point}: {options.hot} hot, {options.cold} cold.")
        with daemon:
            tour(Tour(Shelf(mount_point, mount_point), base, daemon, out), out, tiers=True)
        out.print("Unmounted; the daemon has ended.")


def given_mount(options: argparse.Namespace, out: Console) -> None:
    """What can be done on a mount that belongs to somebody else, in a directory of our own."""
    mount_point = options.mount.absolute()
    tiers = (mount_point / ".ctx" / "stats").exists()
    if not tiers:
        out.print(f"{mount_point} is no ctxfs mount: blocks are written and compared, no more.")
    with scratch(options.dir, keep=False, out=out) as base:
        shelf = Shelf(mount_point / f"demo-{os.getpid()}", mount_point)
        shelf.path.mkdir()
        try:
            tour(Tour(shelf, base, None, out), out, tiers=tiers)
        finally:
            if options.keep:
                out.print(f"{shelf.path} was kept.")
            else:
                shutil.rmtree(shelf.path)


def tour(steps: Tour, out: Console, *, tiers: bool) -> None:
    """All steps that this place allows, in order."""
    out.print(f"Loading {MODEL_NAME}: its weights come with a package, nothing is downloaded.")
    steps.write(*load())
    if tiers:
        steps.force_cold()
        steps.restart()
    steps.read_back()
    if tiers:
        steps.show()
        steps.expire()
    steps.summary()


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    out = Console(highlight=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if options.mount is None:
            own_mount(options, out)
        else:
            given_mount(options, out)
    except DemoFailed as error:
        out.print(f"\nFAILED: {error}", markup=False)
        return EXIT_FAILED
    except (DaemonFailed, ModelMissing, OSError) as error:
        out.print(f"\nThe demo cannot go on: {error}", markup=False)
        return EXIT_CANNOT
    except KeyboardInterrupt:
        out.print("\nInterrupted. Nothing is left mounted.")
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
