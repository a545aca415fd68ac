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
from ..runtime.batch import ANY_STEP, Batch, StepShape
from ..runtime.tables import ResidencyTables


class HiSparseBlockTables(BlockTables):
    """Block tables of one group whose block ids are host pages.

    Attributes:
        tables: Residency by state row.
        batch: The requests of the current forward pass.
        next_shape: Shape of the step that is being prepared.
        drafts_repeat_step: Whether the drafter runs over all tokens of the step, as
            one of several modules does, and not over one token of each request.
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
        self.batch = Batch(
            self.max_num_reqs, self.max_num_batched_tokens, self.block_tables[0].gpu
        )
        self.next_shape: StepShape = ANY_STEP
        self.drafts_repeat_step = False
        self._is_step_new = False
        self._stack_table: torch.Tensor | None = None
        self._stack_of_table: int | None = None

    def gather_block_tables(
        self,
        idx_mapping: torch.Tensor,
        num_reqs_padded: int,
        out: tuple[torch.Tensor, ...] | None = None,
        out_ptrs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Gather the indexers' device blocks of the batch."""
        (table,) = self.input_block_tables if out is None else out
        self.batch.set_requests(idx_mapping, num_reqs_padded)
        self.batch.shape = self.next_shape
        self._is_step_new = True
        self._stack_of_table = None
        self.tables.indexer_table(self.batch, table)
        return (table[:num_reqs_padded],)

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
        if not self._is_step_new and not self.drafts_repeat_step:
            # The drafter goes on with the requests of the step, one token each.
            self.batch.shape = self.batch.shape.decoding()
        self._is_step_new = False
        self.batch.set_query_start(query_start_loc[: len(idx_mapping) + 1])
        self.tables.slots(self.batch, positions, slot_mappings)
        return slot_mappings[:, :num_tokens_padded]

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        self.batch.set_dummy(num_reqs)
        return super().get_dummy_block_tables(num_reqs)

    def of_stack(self, stack: int) -> torch.Tensor:
        """Block table of one stack for the step's requests; good until the next.

        Only a prefill of resident requests asks for it (D26).
        """
        if self._stack_table is None:
            self._stack_table = torch.zeros_like(self.input_block_tables[0])
        if self._stack_of_table != stack:
            self.tables.stack_table(self.batch, stack, self._stack_table)
            self._stack_of_table = stack
        return self._stack_table[: self.batch.num_requests]


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
