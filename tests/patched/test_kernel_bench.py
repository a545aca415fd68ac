# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The benchmark of the kernels runs without a GPU, and judges what it finds."""

import importlib.util
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

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
    assert "met" not in ran.stdout
    assert ran.stdout.count("not measured") == len(kernel_report.TARGETS)
    assert set((BENCH / "results").iterdir()) == before


def test_without_a_gpu_one_line_says_so() -> None:
    ran = run()
    assert ran.returncode == 0, ran.stderr[-2000:]
    (line,) = ran.stdout.splitlines()
    assert line.startswith("skipped: no NVIDIA GPU")


def test_a_cpu_has_no_figures() -> None:
    assert run("--device", "cpu").returncode == 2


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--query-rows", "0", "1 to 15"),
        ("--query-rows", "16", "1 to 15"),
        ("--batches", "-1", "1 or more"),
        ("--replays", "0", "1 or more"),
        ("--replays", "many", "1 or more"),
        ("--host-gib", "0", "0.1 to "),
        ("--host-gib", "nan", "0.1 to "),
        ("--host-gib", "1e9", "0.1 to "),
    ],
)
def test_a_number_out_of_range_is_said_with_the_range(
    option: str, value: str, allowed: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        bench.parse([option, value])
    said = " ".join(capsys.readouterr().err.split())
    assert f"argument {option}: it is {value}; give {allowed}" in said


def test_numbers_at_the_ends_of_their_ranges_are_taken() -> None:
    args = bench.parse(["--query-rows", "1", "15", "--batches", "1", "--replays", "1"])
    assert (args.query_rows, args.batches, args.replays) == ([1, 15], [1], 1)


def rows_of(kind: str, cases: list[tuple[int, int]], **times: float) -> list:
    return [row(kind, batch, query_rows, **times) for batch, query_rows in cases]


EVERY_CASE = [*product((1, 16, 64), (1, 4))]


def test_the_worst_case_decides_whether_a_target_is_met() -> None:
    rows = rows_of("all resident", EVERY_CASE)
    assert judged(rows)[0] == "1.1, met"
    rows[-1].lookup = 6.1
    assert judged(rows)[0] == "1.22, not met"
    assert judged(rows, gpu="NVIDIA L4")[0] == "1.22, not judged"
    rows = rows_of("13 % miss", EVERY_CASE[1::2], resolve=15.0)
    rows.append(row("13 % miss", 16, 1, resolve=40.0))
    assert judged(rows)[1] == "15, met"
    rows.append(row("13 % miss", 32, 4, resolve=16.0))
    assert judged(rows)[1] == "16, not met"
    assert judged([row("13 % miss", 16, 1, both=81.0)])[2] == "81, not met"
    # 3.6 MB in 100 µs are 36 GB/s, of 40.
    rows = rows_of("all miss", EVERY_CASE[2:], fetch=100.0, fetch_bytes=3.6e6)
    assert judged(rows)[3] == "0.9, met"
    rows[-1].fetch = 101.0
    assert judged(rows)[3] == "0.891, not met"


def test_a_target_with_a_case_that_is_not_measured_is_not_judged() -> None:
    assert judged([]) == ["not measured"] * len(kernel_report.TARGETS)
    rows = rows_of("all resident", EVERY_CASE[:-1])
    assert judged(rows)[0] == "not measured: batch 64 with 4 query rows"
    rows = rows_of("13 % miss", [(1, 4), (16, 4)], resolve=9.0)
    assert judged(rows)[1] == "not measured: batch 64 with 4 query rows"


def test_a_case_without_a_figure_is_not_measured() -> None:
    rows = rows_of("13 % miss", EVERY_CASE, resolve=9.0, both=70.0)
    next(r for r in rows if (r.batch, r.query_rows) == (1, 4)).resolve = None
    next(r for r in rows if (r.batch, r.query_rows) == (16, 1)).both = None
    assert judged(rows)[1] == "not measured: batch 1 with 4 query rows"
    assert judged(rows)[2] == "not measured"
    assert judged(rows_of("all miss", EVERY_CASE))[3] == "not measured"


def test_a_driver_that_does_not_answer_is_unknown(monkeypatch) -> None:
    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    assert kernel_report._driver() == "unknown"


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


class PickBytes:
    """Context manager that counts the bytes of all accesses by tiles of picks."""

    def __enter__(self) -> "PickBytes":
        self.count = 0
        builder = interpreter.InterpreterBuilder
        self._saved = builder.create_masked_load, builder.create_masked_store
        load, store = self._saved

        def note(pointers, mask) -> None:
            if np.ndim(mask.data) == 2:
                width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
                self.count += width * int(np.count_nonzero(mask.data))

        def counted_load(itself, pointers, mask, *args):
            note(pointers, mask)
            return load(itself, pointers, mask, *args)

        def counted_store(itself, pointers, value, mask, *args):
            note(pointers, mask)
            return store(itself, pointers, value, mask, *args)

        builder.create_masked_load = counted_load
        builder.create_masked_store = counted_store
        return self

    def __exit__(self, *_: object) -> None:
        builder = interpreter.InterpreterBuilder
        builder.create_masked_load, builder.create_masked_store = self._saved


@pytest.mark.parametrize("query_rows", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_lookup_are_what_the_kernel_loads_and_stores(
    kind, query_rows
) -> None:
    device = torch.device("cpu")
    case = Case(TINY, kind, 3, query_rows, bench.host_rows(TINY, device), device)
    with PickBytes() as counted:
        case.lookup(case.units[0])
    assert counted.count == case.lookup_bytes() > 0
