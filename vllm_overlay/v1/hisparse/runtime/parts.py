# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Tokens of a step with the physical rows that they attend to."""

from dataclasses import dataclass

import torch

from ..kernels.fetch import FetchPart, fetch_rows
from ..kernels.staged_rows import copy_pages
from ..kernels.tensors import FetchPlan
from ..layout import LatentPlace
from .tables import ResidencyTables


@dataclass(frozen=True, eq=False)
class LayerMemory:
    """Where one latent layer's bytes lie.

    Attributes:
        place: The layer in the plan.
        tables: Residency of this rank.
        host_pages: uint8 ``[host pages, page_bytes]``, its part of the host pool.
        slab: uint8 ``[num_blocks, block_bytes]``, the device pool.
    """

    place: LatentPlace
    tables: ResidencyTables
    host_pages: torch.Tensor
    slab: torch.Tensor


@dataclass(frozen=True)
class Part:
    """Tokens whose rows are on the device, and good until the next part is brought.

    Attributes:
        tokens: Which of the step's tokens.
        rows: int32 ``[NS, n, K]``, by stack of the unit; -1 pads.
        valid: int32 ``[n]``, entries of each token that are not padding.
    """

    tokens: slice
    rows: torch.Tensor
    valid: torch.Tensor

    def bring(self, layer: LayerMemory) -> None:
        """Bring the rows that are not on the device yet, for one layer."""


@dataclass(frozen=True)
class HotPart(Part):
    """A part with rows in hot buffers.

    Attributes:
        plan: Rows to fetch.
        state_row: int32 ``[B]``, requests of the plan.
    """

    plan: FetchPlan
    state_row: torch.Tensor

    def bring(self, layer: LayerMemory) -> None:
        self.fetch(layer, FetchPart.ALL)

    def fetch(self, layer: LayerMemory, part: FetchPart) -> None:
        """Fetch a layer's rows, or some of them.

        Hot rows may be fetched ahead of the layer. Overflow rows serve every layer in
        turn, so they are fetched just before its attention (D23).
        """
        tables = layer.tables
        if part is FetchPart.OVERFLOW and not tables.plan.overflow_blocks:
            return
        row_bytes = tables.plan.device.row_bytes
        fetch_rows(
            self.plan,
            self.state_row,
            tables.residency,
            tables.hot,
            layer.host_pages.view(-1, row_bytes),
            layer.slab,
            stack=layer.place.stack,
            layer_offset=layer.place.byte_offset,
            hot_rows=tables.plan.hot.hot_rows,
            block_size=tables.block_size,
            part=part,
        )


@dataclass(frozen=True)
class StagedPart(Part):
    """A part with pages that are staged in the requests' leases.

    Attributes:
        pages: int32 ``[B, C]``, from `list_pages`.
        count: int32 ``[B]``.
        state_row: int32 ``[B]``, requests of the part.
    """

    pages: torch.Tensor
    count: torch.Tensor
    state_row: torch.Tensor

    def bring(self, layer: LayerMemory) -> None:
        copy_pages(
            self.pages,
            self.count,
            self.state_row,
            layer.tables.residency,
            layer.tables.hot,
            layer.host_pages,
            layer.slab,
            layer_offset=layer.place.byte_offset,
        )
