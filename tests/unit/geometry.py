# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Layers of the models that the geometry tests plan for."""

from collections.abc import Iterable

from hisparse_core.layout import DevicePlan, IndexerLayer, LatentLayer, plan_device

INDEXER_TOKEN_BYTES = 132  # 128 fp8 values and one fp32 scale

# GLM-5.3, config.json: layers, MTP layers and IndexShare.
GLM_LAYERS = 78
GLM_MTP_LAYERS = 1
GLM_TOPK = 2048
GLM_TOPK_FREQ = 4
GLM_SKIP_TOPK_OFFSET = 3
GLM_MAX_POSITIONS = 1_048_576


def glm_leaders() -> list[int]:
    """Layers of GLM-5.3 that own an indexer, the MTP layer left out."""
    return [
        layer
        for layer in range(GLM_LAYERS)
        if max(layer - GLM_SKIP_TOPK_OFFSET + 1, 0) % GLM_TOPK_FREQ == 0
    ]


def layers(
    num_latents: int, leaders: Iterable[int], row_bytes: int
) -> tuple[list[LatentLayer], list[IndexerLayer]]:
    """Latents 0..num_latents-1, and an indexer at each of `leaders`."""
    latents = [
        LatentLayer(f"layers.{i}.attn", i, row_bytes) for i in range(num_latents)
    ]
    indexers = [
        IndexerLayer(f"layers.{i}.indexer", i, INDEXER_TOKEN_BYTES) for i in leaders
    ]
    return latents, indexers


def glm_plan(row_bytes: int, *, mtp: bool = True, block_size: int = 64) -> DevicePlan:
    """Plan for GLM-5.3, with or without its MTP layer."""
    leaders = glm_leaders() + [GLM_LAYERS] * mtp
    return plan_device(*layers(GLM_LAYERS + mtp, leaders, row_bytes), block_size)
