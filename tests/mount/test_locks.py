"""Locks between processes: by flock on a file that each of them opens for writing."""

import fcntl

from tests.mount.harness import Daemon, other_process


def test_processes_that_lock_a_file_opened_for_writing_exclude_each_other(
    hot_only: Daemon,
) -> None:
    # filelock, and the `.lock` files of vLLM's hidden-states connector
    path = hot_only.mount / "block.safetensors.lock"
    take = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'w')\n"
        "try: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError: print('held')\n"
        "else: print('taken')\n"
    )
    for _ in range(2):  # while it is new, and once it was sealed
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert other_process(take, path) == "held\n"
        assert other_process(take, path) == "taken\n"
        hot_only.wait_sealed(path.name)
