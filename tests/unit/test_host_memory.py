# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What main memory a host pool may take."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hisparse_core.host_memory import available_ram_bytes, check_shared_memory

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


def shared_memory(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    usage = SimpleNamespace(total=total, free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def test_shared_memory_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_memory(monkeypatch, 64 << 20, 3 << 29)
    check_shared_memory("host_pool_gib", 3 << 29)
    with pytest.raises(ValueError) as error:
        check_shared_memory("host_pool_gib", 2 << 30)
    for part in ("host_pool_gib is 2.00 GiB", "/dev/shm", "1.50 GiB", "--shm-size"):
        assert part in str(error.value), (part, str(error.value))
    with pytest.raises(ValueError, match="allowed: 0.50 GiB.*but for 1.00 GiB"):
        check_shared_memory("host_pool_gib", 3 << 29, reserve=1 << 30)
    check_shared_memory("host_pool_gib", 1 << 29, reserve=1 << 30)


def test_shared_memory_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_memory(monkeypatch, 0, 0)
    check_shared_memory("host_pool_gib", 2 << 30)


def test_no_shared_memory_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(shutil, "disk_usage", missing)
    check_shared_memory("host_pool_gib", 2 << 30)
