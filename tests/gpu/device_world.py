# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Requests, pages and bytes on a device, with tensors that stay where they are.

The host side (tables in numpy, an OrderedDict for each request) says what every launch
must do; the device side is what a captured graph would hold on to.
"""

from collections.abc import Sequence

import numpy as np
import torch
from vllm.v1.hisparse.kernels.assign import assign
from vllm.v1.hisparse.kernels.fetch import FetchPart, fetch_rows
from vllm.v1.hisparse.kernels.lookup import lookup
from vllm.v1.hisparse.kernels.tensors import (
    NUM_COUNTERS,
    NUM_FAULTS,
    HotBlocks,
    HotUnit,
    Residency,
    new_fetch_plan,
    new_hot_state,
    scratch_width,
)

from lru_oracle import HotBuffer

POISON = 0xFF
Rows = list[np.ndarray]


class DeviceWorld:
    """Requests that all hold a lease, with pages that come and go.

    Args:
        device: Where the device pool lies.
        requests: Requests, and most of a batch.
        query_rows: Most query rows of a request.
        top_k: K.
        hot_rows: H.
        pages: Pages of each request.
        block_size: Tokens of a page.
        stacks: G; every stack has one layer of this unit.
        row_bytes: Of a row, a multiple of 16.
        seed: Of everything that is random.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        requests: int = 3,
        query_rows: int = 2,
        top_k: int = 16,
        hot_rows: int = 32,
        pages: int = 12,
        block_size: int = 16,
        stacks: int = 2,
        row_bytes: int = 48,
        seed: int = 0,
    ) -> None:
        self.device = device
        self.rng = np.random.default_rng(seed)
        self.requests, self.query_rows = requests, query_rows
        self.top_k, self.hot_rows, self.pages = top_k, hot_rows, pages
        self.block_size, self.num_stacks = block_size, stacks
        self.row_bytes, self.block_rows = row_bytes, block_size + 3
        self.state_of = self.rng.permutation(requests + 2)[:requests]
        self.mixed_of = self.rng.permutation(requests + 1)[:requests]
        self.num_states, self.num_mixed = requests + 2, requests + 1
        self._make_pools()
        self._make_tables()
        self._make_step_tensors()
        self.oracles = [HotBuffer(hot_rows) for _ in range(requests)]
        self.upload()

    def tensor(self, values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A tensor on the device."""
        return torch.as_tensor(values, dtype=dtype).to(self.device)

    def _make_pools(self) -> None:
        requests, pages, size = self.requests, self.pages, self.block_size
        over_rows = max(0, self.query_rows - 1) * self.top_k
        self.hot_width, self.over_width = (
            -(-self.hot_rows // size),
            -(-over_rows // size),
        )
        lease = self.num_stacks * self.hot_width + self.over_width
        num_blocks = 1 + self.num_mixed * lease + requests * pages * self.num_stacks
        block_bytes = self.block_rows * self.row_bytes
        self.slab = torch.full(
            (num_blocks, block_bytes), POISON, dtype=torch.uint8, device=self.device
        )
        self.free_blocks = (1 + self.rng.permutation(num_blocks - 1)).tolist()
        num_host = 1 + requests * pages
        ids = 1 + self.rng.permutation(num_host - 1)
        self.host_pages = ids.reshape(requests, pages)
        shape = (num_host * size, self.row_bytes)
        self.host = [
            torch.from_numpy(self.rng.integers(0, 255, shape, np.uint8))
            for _ in range(self.num_stacks)
        ]
        if self.device.type == "cuda":
            self.host = [layer.pin_memory() for layer in self.host]

    def _make_tables(self) -> None:
        requests, pages, stacks = self.requests, self.pages, self.num_stacks
        self.page_frame = np.full((self.num_states, pages), -1, np.int32)
        self.frame_blocks = np.zeros((1 + requests * pages, 1 + stacks), np.int32)
        self.free_frames = list(range(1, 1 + requests * pages))
        mixed_row = np.full(self.num_states, -1, np.int32)
        mixed_row[self.state_of] = self.mixed_of
        self.residency = Residency(
            self.tensor(self.page_frame),
            self.tensor(self.frame_blocks),
            self.tensor(mixed_row),
        )

        def lease(*shape: int) -> torch.Tensor:
            blocks = [self.free_blocks.pop() for _ in range(int(np.prod(shape)))]
            return self.tensor(blocks).view(shape)

        self.hot = HotBlocks(
            lease(self.num_mixed, stacks, self.hot_width),
            lease(self.num_mixed, self.over_width),
        )
        table = np.full((self.num_states, pages), 1 << 20, np.int32)
        table[self.state_of] = self.host_pages
        self.host_table = self.tensor(table)
        state = new_hot_state(
            1, self.num_mixed, self.hot_rows, pages * self.block_size, self.device
        )
        self.unit = HotUnit(*(part[0] for part in state))

    def _make_step_tensors(self) -> None:
        batch, entries = self.requests, self.query_rows * self.top_k
        tokens, k = batch * self.query_rows, self.top_k
        empty = lambda *shape: self.tensor(np.zeros(shape, np.int32))  # noqa: E731
        self.positions, self.token_request = empty(tokens, k), empty(tokens)
        self.query_start, self.state_row = empty(batch + 1), empty(batch)
        self.stacks = self.tensor(np.arange(self.num_stacks))
        self.rows, self.code = empty(self.num_stacks, tokens, k), empty(tokens, k)
        self.valid, self.faults = empty(tokens), empty(NUM_FAULTS)
        self.plan = new_fetch_plan(batch, entries, self.device)
        self.used = self.tensor(np.zeros((batch, self.hot_rows)), torch.int8)
        self.scratch = empty(batch, scratch_width(self.hot_rows, entries))
        self.counters = self.tensor(np.zeros((batch, NUM_COUNTERS)), torch.int64)
        self.set_batch([], [])

    # Residency ----------------------------------------------------------------

    def set_residency(self, share: float) -> None:
        """Make each page resident with this probability, changing what is not so."""
        for request in range(self.requests):
            for page in range(self.pages):
                wanted = self.rng.random() < share
                there = self.page_frame[self.state_of[request], page] >= 0
                if wanted and not there:
                    self._restore(request, page)
                elif there and not wanted:
                    self._evict(request, page)
        self.upload()

    def _restore(self, request: int, page: int) -> None:
        frame = self.free_frames.pop()
        blocks = [self.free_blocks.pop() for _ in range(self.num_stacks)]
        self.frame_blocks[frame, 1:] = blocks
        self.page_frame[self.state_of[request], page] = frame
        first = int(self.host_pages[request, page]) * self.block_size
        for layer, block in zip(self.host, blocks):
            rows = layer[first : first + self.block_size].flatten()
            self.slab[block, : len(rows)] = rows.to(self.device)

    def _evict(self, request: int, page: int) -> None:
        """Leave a page on the host; its blocks are free, and poisoned."""
        frame = int(self.page_frame[self.state_of[request], page])
        self.page_frame[self.state_of[request], page] = -1
        blocks = self.frame_blocks[frame, 1:].tolist()
        for block in blocks:
            self.slab[block].fill_(POISON)
        self.free_blocks[:0] = blocks
        self.free_frames.insert(0, frame)

    def upload(self) -> None:
        """Bring the tables to the device."""
        self.residency.page_frame.copy_(torch.from_numpy(self.page_frame))
        self.residency.frame_blocks.copy_(torch.from_numpy(self.frame_blocks))

    # A step -------------------------------------------------------------------

    def draw(self, like: np.ndarray | None = None, keep: float = 0.0) -> np.ndarray:
        """Distinct positions of a query row, some of them those of another one."""
        fresh = self.rng.permutation(self.pages * self.block_size)
        if like is not None:
            kept = like[(like >= 0) & (self.rng.random(self.top_k) < keep)]
            fresh = np.concatenate([kept, fresh[~np.isin(fresh, kept)]])
        row = self.rng.permutation(fresh[: self.top_k]).astype(np.int32)
        row[self.rng.random(self.top_k) < 0.1] = -1
        return row

    def set_batch(self, batch: Sequence[int], rows_of: Sequence[Rows]) -> None:
        """Write a step's batch; what is left of the tensors is padding, and junk.

        Args:
            batch: Request of each batch row.
            rows_of: Its query rows.
        """
        tokens, k = self.positions.shape
        positions = np.tile(np.arange(k, dtype=np.int32), (tokens, 1))
        owner = np.full(tokens, -1, np.int32)
        owner[1::2] = 1 << 30
        states = np.full(self.requests, -1, np.int32)
        states[: len(batch)] = self.state_of[list(batch)]
        token_rows = [row for rows in rows_of for row in rows]
        positions[: len(token_rows)] = np.reshape(token_rows, (-1, k))
        counts = [len(rows) for rows in rows_of]
        owner[: len(token_rows)] = np.repeat(np.arange(len(batch)), counts)
        starts = np.full(self.requests + 1, len(token_rows), np.int32)
        starts[: len(batch) + 1] = np.cumsum([0, *counts])
        for tensor, values in (
            (self.positions, positions),
            (self.token_request, owner),
            (self.state_row, states),
            (self.query_start, starts),
        ):
            tensor.copy_(torch.from_numpy(values))

    def resolve(self) -> None:
        """Launch `lookup` and `assign` over the persistent tensors."""
        sizes = {"block_size": self.block_size, "block_stride_rows": self.block_rows}
        lookup(
            self.positions, self.token_request, self.state_row, self.residency,
            self.unit, self.hot, self.stacks, self.rows, self.code, self.used,
            self.faults, valid=self.valid, **sizes,
        )  # fmt: skip
        assign(
            self.positions, self.query_start, self.state_row, self.residency,
            self.host_table, self.unit, self.hot, self.stacks, self.rows, self.code,
            self.used, self.scratch, self.plan, self.counters, self.faults,
            max_query_rows=self.query_rows, **sizes,
        )  # fmt: skip

    def fetch(self, stack: int, part: FetchPart = FetchPart.ALL) -> None:
        """Launch the fetch of one layer."""
        fetch_rows(
            self.plan, self.state_row, self.residency, self.hot, self.host[stack],
            self.slab, stack=stack, layer_offset=0, hot_rows=self.hot_rows,
            block_size=self.block_size, part=part,
        )  # fmt: skip

    def launch(self) -> None:
        """What one unit launches in a step.

        Overflow rows of all layers share their blocks, so only the last layer's are
        there in the end.
        """
        self.resolve()
        for stack in range(self.num_stacks):
            self.fetch(stack)

    # What must be true then -----------------------------------------------------

    def read(self, stack: int, rows: torch.Tensor) -> torch.Tensor:
        """Bytes of physical rows, as attention reads them; uint8 ``[..., row]``."""
        flat = self.slab.flatten().unfold(0, self.row_bytes, self.row_bytes)
        return flat[rows.clamp(min=0).long()]

    def check(self, batch: Sequence[int], rows_of: Sequence[Rows]) -> None:
        """Compare a step with the oracle, and read what attention would."""
        code, valid = self.code.cpu().numpy(), self.valid.cpu().numpy()
        rows, plan = self.rows.cpu(), [
            t.cpu().numpy() for t in (self.plan.src, self.plan.slot)
        ]  # fmt: skip
        count, hot_count = self.plan.count.tolist(), self.plan.hot_count.tolist()
        order, slot_pos = self.unit.order.cpu(), self.unit.slot_pos.cpu()
        token = 0
        for b, (request, query_rows) in enumerate(zip(batch, rows_of)):
            first = token
            frames = self.page_frame[self.state_of[request]]
            absent = [
                r[(r >= 0) & (frames[r // self.block_size] < 0)] for r in query_rows
            ]
            want = self.oracles[request].step([row.tolist() for row in absent])
            for row in query_rows:
                wanted = self._code(frames, row, want.index)
                assert np.array_equal(code[token], wanted), (request, token)
                assert valid[token] == (row >= 0).sum()
                token += 1
            indices = [want.index[pos] for pos in want.fetched]
            num_hot = sum(index < self.hot_rows for index in indices)
            assert (count[b], hot_count[b]) == (len(indices), num_hot)
            assert plan[0][b, : count[b]].tolist() == self._host_rows(request, want)
            assert plan[1][b, : count[b]].tolist() == indices
            mixed, slots = self.mixed_of[request], self.oracles[request].slots
            assert order[mixed].tolist() == list(slots)
            held = [slots[slot] for slot in range(self.hot_rows)]
            assert slot_pos[mixed].tolist() == [-1 if p is None else p for p in held]
            self._check_bytes(request, query_rows, slice(first, token))
        assert not any(count[len(batch) :]) and not valid[token:].any()
        assert (rows[:, token:] == -1).all() and (code[token:] == -1).all()
        assert not self.used.any() and not self.faults.any()

    def _code(
        self, frames: np.ndarray, row: np.ndarray, index: dict[int, int]
    ) -> np.ndarray:
        hot = np.array([-3 - index.get(pos, 0) for pos in row.tolist()])
        frame = frames[row // self.block_size]
        resident = frame * self.block_size + row % self.block_size
        return np.where(row < 0, -1, np.where(frame < 0, hot, resident))

    def _host_rows(self, request: int, want) -> list[int]:
        pages, size = self.host_pages[request], self.block_size
        return [int(pages[p // size]) * size + p % size for p in want.fetched]

    def _check_bytes(self, request: int, query_rows: Rows, tokens: slice) -> None:
        positions = torch.from_numpy(np.stack(query_rows)).long()
        picked = positions >= 0
        pages = torch.from_numpy(self.host_pages[request])
        source = pages[positions // self.block_size] * self.block_size
        source = (source + positions % self.block_size)[picked]
        # Codes of overflow rows: what another layer put there last is not this one's.
        over = self.code[tokens].cpu() <= -3 - self.hot_rows
        for stack in range(self.num_stacks):
            got = self.read(stack, self.rows[stack, tokens]).cpu()[picked]
            same = (got == self.host[stack][source]).all(1)
            if stack < self.num_stacks - 1:
                same |= over[picked]
            assert same.all(), (request, stack)
