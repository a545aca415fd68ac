# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The host pool: one dense tensor of pages for each layer (D6)."""

import torch

from ..layout import DevicePlan


class HostPool:
    """Pages of all layers in host memory, pinned where there is a GPU.

    Attributes:
        buffer: uint8, the whole pool.
        layers: By layer name, uint8 ``[num_pages, page_bytes]`` views of `buffer`.
    """

    def __init__(self, plan: DevicePlan, num_pages: int, pin: bool) -> None:
        self.buffer = torch.zeros(
            num_pages * plan.host_page_bytes, dtype=torch.uint8, pin_memory=pin
        )
        self.layers: dict[str, torch.Tensor] = {}
        offsets = plan.host_layer_offsets(num_pages)
        for layer, offset in zip(plan.host_layers, offsets, strict=True):
            size = num_pages * layer.page_bytes
            view = self.buffer[offset : offset + size]
            self.layers[layer.name] = view.view(num_pages, layer.page_bytes)

    def rows(self, layer_name: str, row_bytes: int) -> torch.Tensor:
        """A layer's pages as rows, uint8 ``[num_pages * block_size, row_bytes]``."""
        return self.layers[layer_name].view(-1, row_bytes)
