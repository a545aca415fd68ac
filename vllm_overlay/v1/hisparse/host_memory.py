# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""How much main memory a host pool can have. Standard library only."""

from pathlib import Path

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
