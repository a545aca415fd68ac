# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Cache types by which scheduler and workers know HiSparse (D6, D8)."""

from dataclasses import dataclass

from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec

from ..capacity import PoolPlan
from ..settings import DEFAULT_TRANSFER_TIMEOUT_S


@dataclass(frozen=True, kw_only=True)
class HiSparsePageSpec(MLAAttentionSpec):
    """The scheduler's only group: a block id is a page of all layers (D6).

    Its type selects the manager through the spec registry. The fields it inherits are
    those of one latent layer.

    Attributes:
        plan: sizes of both pools, of leases and of pages.
        num_ranks: workers that must acknowledge a copy (R1).
        transfer_timeout_s: seconds after which copies under way are
            not waited for any more.
    """

    plan: PoolPlan
    num_ranks: int = 1
    transfer_timeout_s: float = DEFAULT_TRANSFER_TIMEOUT_S


@dataclass
class HiSparseKVCacheConfig(KVCacheConfig):
    """Cache configuration with the plan it came from.

    `num_blocks` counts device blocks for a worker, host pages for the scheduler.

    Attributes:
        plan: as in `HiSparsePageSpec`; always set.
        num_ranks: as in `HiSparsePageSpec`.
        transfer_timeout_s: as in `HiSparsePageSpec`.
    """

    plan: PoolPlan | None = None
    num_ranks: int = 1
    transfer_timeout_s: float = DEFAULT_TRANSFER_TIMEOUT_S
