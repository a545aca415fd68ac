# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The runner's block tables with frames behind them (D16).

vLLM's table rows hold host pages. What the model reads and writes are device
blocks: the indexers' table goes into `input_block_tables`, and `slot_mappings` gets a
row for the indexers and one for each stack. All callers, the drafter included, go
through these methods or read these attributes.
"""

import torch

from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.block_table import BlockTables

from ..capacity import PoolPlan
from ..runtime.batch import Batch
from ..runtime.tables import NO_ROW, ResidencyTables


class HiSparseBlockTables(BlockTables):
    """Block tables of one group whose block ids are host pages.

    Attributes:
        tables: Residency by state row.
        batch: The requests of the current forward pass.
    """

    def __init__(self, *args, plan: PoolPlan, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        assert self.num_kv_cache_groups == 1
        assert self.block_sizes == self.kernel_block_sizes == [plan.device.block_size]
        self.tables = ResidencyTables(plan, self.max_num_reqs, self.device)
        self.slot_mappings = torch.full(
            (plan.device.frame_blocks, self.max_num_batched_tokens),
            PAD_SLOT_ID,
            dtype=torch.int64,
            device=self.device,
        )
        self._set_batch(torch.empty(0, dtype=torch.int64), 0)

    def _set_batch(self, idx_mapping: torch.Tensor, num_reqs_padded: int) -> None:
        self._num_reqs = len(idx_mapping)
        self._state_row = torch.full((num_reqs_padded,), NO_ROW, dtype=torch.int32)
        self._state_row[: self._num_reqs] = idx_mapping
        self._host_table = self.block_tables[0].gpu[self._state_row.long()]
        query_start = torch.zeros(num_reqs_padded + 1, dtype=torch.int32)
        self.batch = Batch.build(self._state_row, query_start, self._host_table)

    def gather_block_tables(
        self,
        idx_mapping: torch.Tensor,
        num_reqs_padded: int,
        out: tuple[torch.Tensor, ...] | None = None,
        out_ptrs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Gather the indexers' device blocks of the batch."""
        (table,) = self.input_block_tables if out is None else out
        table[:num_reqs_padded].zero_()
        self.tables.indexer_table(idx_mapping.long(), table)
        self._set_batch(idx_mapping, num_reqs_padded)
        return (table[:num_reqs_padded],)

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        self._set_batch(torch.empty(0, dtype=torch.int64), num_reqs)
        return super().get_dummy_block_tables(num_reqs)

    def compute_slot_mappings(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_tokens_padded: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute where each token is written, by indexers and stacks."""
        slot_mappings = self.slot_mappings if out is None else out
        slot_mappings.fill_(PAD_SLOT_ID)
        num_reqs = len(idx_mapping)
        query_start = query_start_loc[: num_reqs + 1]
        num_tokens = int(query_start[-1])
        state_row = torch.repeat_interleave(idx_mapping.long(), query_start.diff())
        self.tables.slots(state_row, positions[:num_tokens], slot_mappings)
        # The drafter changes the number of rows of a request, not the requests.
        padded = torch.full((len(self._state_row) + 1,), num_tokens, dtype=torch.int32)
        padded[: num_reqs + 1] = query_start
        self.batch = Batch.build(self._state_row, padded, self._host_table)
        return slot_mappings[:, :num_tokens_padded]


def slots_by_layer(
    plan: PoolPlan, slot_mappings: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Row of the slot mappings that each layer writes by.

    Args:
        plan: The pools.
        slot_mappings: int64 ``[1 + G, T]``.
    """
    device = plan.device
    latents = {p.name: slot_mappings[1 + p.stack] for p in device.latents}
    return latents | {p.name: slot_mappings[0] for p in device.indexers}
