"""Members die, links are cut, etcd goes away, and all of it under load: what may never happen.

CTXFS_CHAOS_SECONDS makes it last longer, CTXFS_CHAOS_SEED replays what is chosen,
CTXFS_CHAOS_MEMBERS says how many there are.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import pytest

from tests.mount.cluster_chaos import CALL_S, Chaos, Clients, check_calm, check_failures
from tests.network import skip_without_namespaces

SECONDS = float(os.environ.get("CTXFS_CHAOS_SECONDS", "8"))
SEED = os.environ.get("CTXFS_CHAOS_SEED", "1")
MEMBERS = "abcde"[: int(os.environ.get("CTXFS_CHAOS_MEMBERS", "3"))]


@pytest.mark.slow
@pytest.mark.channel("direct")
@pytest.mark.timeout(300 + 2 * SECONDS)
def test_in_troubles_no_byte_is_wrong_nobody_hangs_and_nothing_deleted_comes_back(
    channel: str, tmp_path: Path
) -> None:
    skip_without_namespaces()
    faulthandler.cancel_dump_traceback_later()  # ends what takes long; the mark above does, too
    with Chaos(tmp_path, MEMBERS, channel, SEED) as chaos:
        with Clients(chaos, each=2) as clients:
            for _ in chaos.trouble(SECONDS):
                assert not chaos.ended()
                if clients.has_complaint():
                    break
            report = clients.stop()
        sys.stdout.write(
            f"{report.done} {report.refused}; the longest {report.longest}, "
            f"the longest start {chaos.longest_start_s:.1f} s\n"
        )
        sys.stdout.write("\n".join(report.odd) + "\n")
        sys.stdout.write(f"\n{chaos.times(report)}\n\n")
        chaos.tell_deaths(report)
        chaos.wait_healthy()
        check_failures(chaos, report, 1 if SECONDS < 30 else 2)
        check_calm(chaos, report)
        assert report.longest[0] < CALL_S + chaos.longest_start_s
        assert all("Traceback" not in daemon.log() for daemon in chaos.daemons.values())
