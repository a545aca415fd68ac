# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The benchmark of the kernels runs without a GPU, and judges what it finds."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs the patched vLLM")

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))

from vllm.v1.attention.backends.mla import sparse_utils  # noqa: E402

import kernel_report  # noqa: E402
from kernel_baselines import gather_rows, own_conversion  # noqa: E402
from kernel_cases import KINDS, TINY, Case  # noqa: E402

# Not by its name, which the package of tests/kernels has, too.
_spec = importlib.util.spec_from_file_location("bench_kernels", BENCH / "kernels.py")
assert _spec is not None and _spec.loader is not None
bench = importlib.util.module_from_spec(_spec)
sys.modules["bench_kernels"] = bench
_spec.loader.exec_module(bench)

CEILINGS = bench.Ceilings(4e12, 50e9, 40e9, 64)


def row(kind: str, batch: int, query_rows: int, **times: float) -> object:
    known = {"plain": 5.0, "plain_counted": 5.0, "lookup": 5.5, "lookup_bytes": 1000}
    return bench.Row(kind, batch, query_rows, **(known | times))


def judged(rows: list, gpu: str = "NVIDIA H200") -> list[str]:
    report = kernel_report.Report({"gpu": gpu}, CEILINGS, rows, {})
    return [verdict for _, verdict in report.targets()]


def run(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCH / "kernels.py"), *args]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=env)


def test_a_dry_run_measures_every_case_and_writes_nothing() -> None:
    before = set((BENCH / "results").iterdir())
    ran = run("--device", "cpu", "--dry-run")
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "these figures mean nothing" in ran.stdout.splitlines()[0]
    cases = [line for line in ran.stdout.splitlines() if line.startswith("| all hit")]
    assert len(cases) == 2 and all(line.count("|") == 14 for line in cases)
    assert "met" not in ran.stdout and "not judged" in ran.stdout
    assert set((BENCH / "results").iterdir()) == before


def test_without_a_gpu_one_line_says_so() -> None:
    ran = run()
    assert ran.returncode == 0, ran.stderr[-2000:]
    (line,) = ran.stdout.splitlines()
    assert line.startswith("skipped: no NVIDIA GPU")


def test_a_cpu_has_no_figures() -> None:
    assert run("--device", "cpu").returncode == 2


def test_the_worst_case_decides_whether_a_target_is_met() -> None:
    rows = [row("all resident", 1, 1), row("all resident", 64, 4, lookup=6.1)]
    assert judged(rows[:1])[0] == "1.1, met"
    assert judged(rows)[0] == "1.22, not met"
    assert judged(rows, gpu="NVIDIA L4")[0] == "1.22, not judged"
    rows = [row("13 % miss", 1, 4, resolve=15.0), row("13 % miss", 16, 1, resolve=40.0)]
    assert judged(rows)[1] == "15, met"
    assert judged([row("13 % miss", 16, 1, both=81.0)])[2] == "81, not met"
    # 3.6 MB in 100 µs are 36 GB/s, of 40.
    rows = [row("all miss", 16, 1, fetch=100.0, fetch_bytes=3.6e6)]
    assert judged(rows)[3] == "0.9, met"
    rows.append(row("all miss", 64, 1, fetch=101.0, fetch_bytes=3.6e6))
    assert judged(rows)[3] == "0.891, not met"
    assert judged([])[3] == "not measured"


def test_results_carry_the_machine_and_the_date(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(kernel_report, "RESULTS", tmp_path)
    about = {"gpu": "NVIDIA H200", "date": "2026-01-02", "sizes": {"top_k": 2048}}
    report = kernel_report.Report(about, CEILINGS, [row("all hit", 1, 1)], {8: 3.0})
    text, figures = report.write()
    assert text.name == "kernels-nvidia-h200-2026-01-02.md"
    assert "gpu NVIDIA H200" in text.read_text()
    assert json.loads(figures.read_text())["about"] == about


@pytest.mark.parametrize("counted", [False, True])
def test_our_own_conversion_does_the_work_of_the_release(counted) -> None:
    random = torch.Generator().manual_seed(0)
    positions = torch.randint(-40, 640, (3, 256), generator=random, dtype=torch.int32)
    table = torch.randint(1000, (2, 10), generator=random, dtype=torch.int32)
    owner = torch.tensor([1, 0, 1], dtype=torch.int32)
    want = sparse_utils.triton_convert_req_index_to_global_index(
        owner, table, positions, NUM_TOPK_TOKENS=256, return_valid_counts=True
    )
    out, valid = torch.zeros_like(positions), torch.zeros(3, dtype=torch.int32)
    own_conversion(owner, table, positions, out, valid if counted else None)
    assert torch.equal(out, want[0])
    assert torch.equal(valid, want[1]) == counted


@pytest.mark.parametrize("programs", [1, 3])
def test_the_gather_brings_every_row(programs) -> None:
    host = torch.arange(20 * 48).remainder(251).to(torch.uint8).view(20, 48)
    rows = torch.tensor([7, 19, 0, 7], dtype=torch.int32)
    out = torch.zeros(4, 48, dtype=torch.uint8)
    gather_rows(rows, host, out, programs)
    assert torch.equal(out, host[rows.long()])


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_misses_as_often_as_its_name_says(kind) -> None:
    device = torch.device("cpu")
    case = Case(TINY, kind, 3, 1, bench.host_rows(TINY, device), device)
    unit = case.units[1]
    case.lookup(unit)
    if case.miss is not None:
        case.assign(unit)
        rows = round((case.miss or 0) * TINY.top_k)
        assert unit.plan.count.tolist() == [rows] * 3
        # Put back, the same step does the same once more.
        before = unit.plan.src.clone()
        case.restore()
        case.lookup(unit)
        case.assign(unit)
        assert torch.equal(unit.plan.src, before)
    assert not case.faults.any() and (case.rows >= 0).all()
    assert all(len(set(row)) == TINY.top_k for row in unit.positions.tolist())
