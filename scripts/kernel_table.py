# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Compile every kernel for every target, without a GPU, and show what it takes.

Runs in the CPU environment, without Triton's interpreter. The launchers themselves say
what is compiled: they are called with tensors that have no memory, and their launches
are recorded instead of run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hisparse_tools.compile_options import parse
from hisparse_tools.errors import ToolError, run_command
from hisparse_tools.paths import this_project
from hisparse_tools.progress import Steps, say
from hisparse_tools.readme import between
from launch_recorder import LaunchRecorder, RecordedLaunch

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes that a kernel may spill. Hopper is the first target, so none there.
MOST_SPILLED = {"sm_90": 0, "sm_100": 64, "sm_120": 64, "gfx942": 64}
COPY_KERNELS = ("_fetch_kernel", "_copy_pages_kernel")

TYPES = {
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}

BEGIN = "<!-- kernels:begin (written by nox -s compile -- --write) -->"
END = "<!-- kernels:end -->"

# GLM-5.3 with its MTP layer, block bytes by row bytes.
BLOCK_BYTES = {656: 209_920, 576: 186_048, 1152: 294_912}
TOP_K, HOT_ROWS, BLOCK, BATCH = 2048, 4096, 64, 64
STATES, PAGES, FRAMES, MIXED = 256, 16_385, 91_047, 57


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel, as a launcher made it."""

    label: str
    kernel: JITFunction
    args: tuple[Any, ...]
    sizes: dict[str, Any]

    def source(self) -> ASTSource:
        """What Triton would specialise the kernel on."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], list] = {}
        values = dict(zip(self.kernel.arg_names, self.args)) | self.sizes
        for index, parameter in enumerate(self.kernel.params):
            name, value = parameter.name, values[parameter.name]
            is_special = not parameter.do_not_specialize
            if isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
                if not parameter.do_not_specialize_on_alignment:
                    attributes[(index,)] = [["tt.divisibility", 16]]
            elif parameter.is_constexpr or value is None or (value == 1 and is_special):
                signature[name] = "constexpr"
                constants[name] = value
            else:
                signature[name] = "i32" if abs(value) < 1 << 31 else "i64"
                if is_special and value % 16 == 0:
                    attributes[(index,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attributes)


@dataclass(frozen=True)
class Compiled:
    """What one compiled kernel takes.

    Attributes:
        registers: For each thread.
        spilled: Bytes that do not fit into registers, for each thread.
        shared: Bytes of shared memory.
        assembly: PTX, or AMD's assembly.
    """

    registers: int
    spilled: int
    shared: int
    assembly: str


class Recorder(LaunchRecorder):
    """Records launches instead of running them.

    Attributes:
        labels: Of the launches, in their order.
        label: Of those that come.
    """

    def __init__(self) -> None:
        super().__init__(run=False)
        self.labels: list[str] = []
        self.label = ""

    def note(self, launch: RecordedLaunch) -> None:
        """See `LaunchRecorder`."""
        super().note(launch)
        self.labels.append(self.label)

    def labelled(self) -> list[Launch]:
        """The launches with their labels."""
        pairs = zip(self.labels, self.launches)
        return [Launch(label, x.kernel, x.args, x.sizes) for label, x in pairs]


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def record_all(recorder: Recorder) -> None:
    """Call every launcher at production shapes."""
    from kernels.reset import reset_rows
    from kernels.slots import gather_indexer_table, slot_mappings
    from kernels.staging import list_pages, mark_pages
    from kernels.tensors import Residency

    i16, i64, i8 = torch.int16, torch.int64, torch.int8
    residency = Residency(empty(STATES, PAGES), empty(FRAMES, 17), empty(STATES))
    states, counts = empty(BATCH), empty(STATES)
    recorder.label = "all rows"
    slots = empty(17, 8192, dtype=i64)
    positions = empty(8192, dtype=i64)
    slot_mappings(
        positions, empty(BATCH + 1), states, residency, slots, empty(8192),
        block_size=BLOCK,
    )  # fmt: skip
    gather_indexer_table(states, counts, residency, empty(STATES, PAGES - 1))
    units = (22, MIXED)
    reset_rows(
        empty(3), empty(*units, HOT_ROWS), empty(*units, HOT_ROWS, dtype=i16),
        empty(*units, PAGES * BLOCK, dtype=i16),
    )  # fmt: skip
    marks, topk = empty(STATES, PAGES, dtype=i8), empty(753, TOP_K)
    mark_pages(
        topk, empty(753), states, counts, residency, marks[:BATCH], block_size=BLOCK
    )
    list_pages(
        states, counts, empty(STATES, PAGES), marks, empty(STATES, PAGES),
        empty(BATCH, 1088), empty(BATCH),
    )  # fmt: skip
    for query_rows in (1, 4):
        for row_bytes, block_bytes in BLOCK_BYTES.items():
            record_rows(recorder, residency, query_rows, row_bytes, block_bytes)


def record_rows(
    recorder: Recorder, residency: Any, query_rows: int, row_bytes: int, stride: int
) -> None:
    """Call the launchers that depend on query rows or on the bytes of a row."""
    from kernels.assign import assign
    from kernels.fetch import FetchPart, fetch_rows
    from kernels.lookup import lookup
    from kernels.staged_rows import copy_pages, staged_rows
    from kernels.tensors import FetchPlan, HotBlocks, HotUnit
    from kernels.translate import translate

    tokens, entries = BATCH * query_rows, query_rows * TOP_K
    over = max(0, query_rows - 2) * TOP_K // BLOCK
    hot = HotBlocks(empty(MIXED, 16, HOT_ROWS // BLOCK), empty(MIXED, over))
    unit = HotUnit(
        empty(MIXED, HOT_ROWS),
        empty(MIXED, HOT_ROWS, dtype=torch.int16),
        empty(MIXED, PAGES * BLOCK, dtype=torch.int16),
    )
    states, owner, topk = empty(BATCH), empty(tokens), empty(tokens, TOP_K)
    code, valid, faults = empty(tokens, TOP_K), empty(tokens), empty(3)
    used = empty(STATES, HOT_ROWS, dtype=torch.int8)
    plan = FetchPlan(
        empty(STATES, entries), empty(STATES, entries), empty(STATES), empty(STATES)
    )
    sizes = {"block_size": BLOCK, "block_stride_rows": stride // row_bytes}
    if row_bytes == 656:
        for num_stacks in (1, 2):
            recorder.label = f"{query_rows} query rows, {num_stacks} stacks"
            stacks, rows = empty(num_stacks), empty(num_stacks, tokens, TOP_K)
            resolved = (unit, hot, stacks, rows, code, used)
            lookup(
                topk, owner, states, residency, *resolved, faults, valid=valid, **sizes
            )
            assign(
                topk, empty(BATCH + 1), states, residency, empty(STATES, PAGES),
                *resolved, empty(STATES, 2 * HOT_ROWS + entries), plan,
                empty(STATES, 5, dtype=torch.int64), faults,
                max_query_rows=query_rows, **sizes,
            )  # fmt: skip
            translate(
                code, owner, states, residency, hot, stacks, rows,
                hot_rows=HOT_ROWS, **sizes,
            )  # fmt: skip
            staged_rows(
                topk, owner, states, empty(STATES), residency, hot,
                empty(STATES, PAGES), stacks, rows, faults, valid=valid, **sizes,
            )  # fmt: skip
    host = empty(1000 * BLOCK, row_bytes, dtype=torch.uint8)
    slab = empty(FRAMES, stride, dtype=torch.uint8)
    for part in FetchPart:
        recorder.label = f"{query_rows} query rows, {row_bytes} B, {part.name.lower()}"
        fetch_rows(
            plan, states, residency, hot, host, slab, stack=3, layer_offset=0,
            hot_rows=HOT_ROWS, block_size=BLOCK, part=part,
        )  # fmt: skip
    recorder.label = f"{query_rows} query rows, {row_bytes} B"
    lease_blocks = 16 * HOT_ROWS // BLOCK + over
    copy_pages(
        empty(BATCH, lease_blocks), empty(BATCH), states, residency, hot,
        host.view(1000, -1), slab, layer_offset=0,
    )  # fmt: skip


def compile_for(launch: Launch, name: str) -> Compiled:
    """Compile a launch's kernel for a target."""
    options = {"num_warps": launch.sizes["num_warps"]}
    compiled = triton.compile(launch.source(), target=TARGETS[name], options=options)
    shared = int(compiled.metadata.shared)
    if not name.startswith("sm_"):
        assembly = compiled.asm["amdgcn"]
        spilled = 4 * _number(r"\.vgpr_spill_count:\s*(\d+)", assembly)
        registers = _number(r"\.vgpr_count:\s*(\d+)", assembly)
        return Compiled(registers, spilled, shared, assembly)
    assembly = compiled.asm["ptx"]
    text = _ptxas(assembly, name)
    registers = _number(r"Used (\d+) registers", text)
    return Compiled(
        registers, _number(r"(\d+) bytes stack frame", text), shared, assembly
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, (pattern, text[-2000:])
    return int(found[1])


def _ptxas(ptx: str, name: str) -> str:
    # Triton brings two, and knows which of them a target takes.
    program = get_ptxas(TARGETS[name].arch).path
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [
            program,
            "-v",
            f"--gpu-name={name}a",
            file.name,
            "-o",
            os.devnull,
        ]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return ran.stderr


def problems(launch: Launch, name: str, compiled: Compiled) -> Iterator[str]:
    """What a compiled kernel does that it must not."""
    if compiled.spilled > MOST_SPILLED[name]:
        yield f"it spills {compiled.spilled} bytes, allowed are {MOST_SPILLED[name]}"
    if launch.kernel.__name__ in COPY_KERNELS and name.startswith("sm_"):
        loads = set(re.findall(r"ld\.global[\w.]*", compiled.assembly))
        stores = set(re.findall(r"st\.global[\w.]*", compiled.assembly))
        if not any(".v4.b32" in load for load in loads):
            yield f"no 16-byte load among {', '.join(sorted(loads))}"
        if not any(".v4.b32" in store for store in stores):
            yield f"no 16-byte store among {', '.join(sorted(stores))}"
        if any(".nc" in load for load in loads):
            yield "a load that need not see what other kernels wrote (.nc)"


def distinct(launches: list[Launch]) -> list[Launch]:
    """One launch for each different kernel; what differs is shown by the label."""
    seen: dict[str, Launch] = {}
    for launch in launches:
        source = launch.source()
        key = f"{launch.kernel.__name__} {source.signature} {source.constants}"
        seen.setdefault(f"{key} {source.attrs} {launch.sizes['num_warps']}", launch)
    return list(seen.values())


def compile_all(launches: list[Launch]) -> tuple[list[str], list[str]]:
    """Compile every launch for every target: lines of the table, and problems."""
    lines, wrong = [], []
    with Steps("compiling", len(launches) * len(TARGETS)) as steps:
        for launch in launches:
            kernel = launch.kernel.__name__.strip("_").removesuffix("_kernel")
            cells = []
            for name in TARGETS:
                steps.begin(f"{kernel} ({launch.label}) for {name}")
                compiled = compile_for(launch, name)
                cells.append(
                    f"{compiled.registers} / {compiled.spilled} / {compiled.shared:,}"
                )
                label = f"{launch.kernel.__name__}, {launch.label}, {name}"
                wrong += [f"{label}: {p}" for p in problems(launch, name, compiled)]
            warps = launch.sizes["num_warps"]
            lines.append(
                f"| {kernel} | {launch.label} | {warps} | {' | '.join(cells)} |"
            )
    return lines, wrong


def main(argv: Sequence[str]) -> int:
    """Compile, print the table, and say what is wrong."""
    args = parse(argv, __doc__)
    if "TRITON_INTERPRET" in os.environ:
        raise ToolError(
            "TRITON_INTERPRET is set; the interpreter compiles nothing",
            "unset it, or run: nox -s compile",
        )
    project = this_project()
    sys.path.insert(0, str(project.overlay / "v1" / "hisparse"))
    recorder = Recorder()
    with recorder:
        record_all(recorder)
    launches = distinct(recorder.labelled())
    lines, wrong = compile_all(launches)
    header = f"| kernel | shape | warps | {' | '.join(TARGETS)} |"
    table = "\n".join([header, "| --- " * (3 + len(TARGETS)) + "|", *lines])
    say(table)
    if args.write:
        path = project.root / "docs" / "kernels.md"
        text = between(path.read_text(), BEGIN, END, table + "\n", "docs/kernels.md")
        path.write_text(text)
    for problem in wrong:
        say(f"error: {problem}")
    say(
        f"Triton {triton.__version__}: {len(launches)} kernels for {len(TARGETS)} "
        f"targets, {len(wrong)} problems"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    run_command(main)
