# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What main memory a host pool may take."""

from pathlib import Path

from hisparse_core.host_memory import available_ram_bytes

KIB = 1024


def machine(folder: Path, available_kib: int) -> Path:
    proc = folder / "proc"
    proc.mkdir()
    text = f"MemTotal: 9999 kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\n"
    (proc / "meminfo").write_text(text)
    return proc


def container(folder: Path, limit: str, used: int, cached: int, *, v1: bool) -> Path:
    root = folder / "cgroup"
    place = root / "memory" if v1 else root
    place.mkdir(parents=True)
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if v1
        else ("memory.max", "memory.current", "inactive_file")
    )
    (place / names[0]).write_text(limit + "\n")
    (place / names[1]).write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\nfile 7\n")
    return root


def test_machine_without_a_limit(tmp_path: Path) -> None:
    proc = machine(tmp_path, 100)
    assert available_ram_bytes(proc, tmp_path / "none") == 100 * KIB


def test_container_without_a_limit(tmp_path: Path) -> None:
    proc = machine(tmp_path, 100)
    cgroup = container(tmp_path, "max", 10, 0, v1=False)
    assert available_ram_bytes(proc, cgroup) == 100 * KIB


def test_container_limit_less_use_without_cache(tmp_path: Path) -> None:
    proc = machine(tmp_path, 100)
    cgroup = container(tmp_path, str(60 * KIB), 50 * KIB, 20 * KIB, v1=False)
    assert available_ram_bytes(proc, cgroup) == 30 * KIB


def test_version_1_container(tmp_path: Path) -> None:
    proc = machine(tmp_path, 100)
    cgroup = container(tmp_path, str(60 * KIB), 50 * KIB, 20 * KIB, v1=True)
    assert available_ram_bytes(proc, cgroup) == 30 * KIB


def test_machine_that_is_fuller_than_the_container(tmp_path: Path) -> None:
    proc = machine(tmp_path, 10)
    cgroup = container(tmp_path, str(60 * KIB), 0, 0, v1=False)
    assert available_ram_bytes(proc, cgroup) == 10 * KIB


def test_nothing_known(tmp_path: Path) -> None:
    assert available_ram_bytes(tmp_path / "a", tmp_path / "b") is None


def test_this_machine() -> None:
    assert (available_ram_bytes() or 0) > 1 << 20
