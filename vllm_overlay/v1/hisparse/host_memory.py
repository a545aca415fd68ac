# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""How much main memory a host pool can have. Standard library only."""

import shutil
from pathlib import Path

from .settings import GIB, refusal

SHARED = Path("/dev/shm")
"""Files here are memory, which processes share."""

_CGROUP_FILES = (
    # version 2, then version 1: limit, usage, statistics
    ("memory.max", "memory.current", "memory.stat"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
    ),
)


def available_ram_bytes(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Main memory that can still be had, in bytes; None where it cannot be known.

    The machine's figure, or what is left of the container's limit where that is less.
    """
    figures = [_machine_bytes(proc), *(_left_bytes(cgroup, f) for f in _CGROUP_FILES)]
    known = [figure for figure in figures if figure is not None]
    return min(known) if known else None


def check_shared_memory(setting: str, num_bytes: int, reserve: int = 0) -> None:
    """Refuse a host pool of several ranks that does not fit where memory is shared.

    A file that outgrows the file system would end the process that touches it.

    Args:
        setting: What gives the size, with its value.
        num_bytes: Bytes of all pools of this node.
        reserve: Bytes beside them, for what others will keep there.
    """
    try:
        usage = shutil.disk_usage(SHARED)
    except OSError:
        return  # Whoever makes the file says why it cannot.
    # A file system without a limit says 0.
    room = usage.free - reserve
    if usage.total and num_bytes > room:
        raise refusal(
            setting,
            f"{num_bytes / GIB:.2f} GiB in all, which ranks share in {SHARED}",
            f"{max(0, room) / GIB:.2f} GiB, which are free there, but for "
            f"{reserve / GIB:.2f} GiB that others need",
            "make it larger (mount -o remount,size=...; in a container --ipc=host or "
            "--shm-size), or make the pool smaller",
        )


def _machine_bytes(proc: Path) -> int | None:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _left_bytes(cgroup: Path, files: tuple[str, str, str]) -> int | None:
    limit, usage, statistics = (cgroup / name for name in files)
    try:
        left = int(limit.read_text()) - int(usage.read_text())
        # The page cache counts as used, but gives way.
        for line in statistics.read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return left + int(line.split()[1])
    except (OSError, ValueError, IndexError):  # "max": no limit
        return None
    return left
