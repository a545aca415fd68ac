# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Leases, bookkeeping and capacities (D14, D21, D23, D32)."""

import pytest
from hisparse_core.capacity import HotSizes, Limits, PoolPlan, plan_pools, pool_bytes
from hisparse_core.layout import plan_device

from geometry import GLM_MAX_POSITIONS, GLM_TOPK, glm_plan, layers

GIB = 1 << 30
MTP3 = HotSizes(topk=GLM_TOPK, hot_rows=2 * GLM_TOPK, drafts=3)


def glm_pools(
    kv_gib: float,
    max_model_len: int,
    hot: HotSizes = MTP3,
    window_tokens: int = 16_384,
    host_gib: float = 384,
) -> PoolPlan:
    """Pools of GLM-5.3 with FP8 rows, 256 requests at most."""
    device = glm_plan(656)
    limits = Limits(max_model_len, max_num_seqs=256, window_tokens=window_tokens)
    room = pool_bytes(device, hot, limits, int(kv_gib * GIB))
    blocks = room // device.block_bytes
    return plan_pools(device, hot, limits, blocks, int(host_gib * GIB))


def tiny_pools(num_blocks: int, *, window_tokens: int = 64, **hot: int) -> PoolPlan:
    """Pools of the tiny GLM, fp32 rows, 16 tokens a page, top-k 32."""
    device = plan_device(*layers(7, [0, 1, 5, 6], 2_304), 16)
    sizes = HotSizes(**{"topk": 32, "hot_rows": 64, **hot})
    limits = Limits(max_model_len=512, max_num_seqs=8, window_tokens=window_tokens)
    return plan_pools(device, sizes, limits, num_blocks, host_bytes=100 << 20)


class TestLease:
    def test_three_drafts_lease_1088_blocks(self) -> None:
        plan = glm_pools(24.5, 83_000)
        assert (plan.hot_blocks, plan.overflow_blocks) == (64, 64)
        assert plan.lease_blocks == 16 * 64 + 64

    @pytest.mark.parametrize(
        "hot_rows, drafts, overflow",
        [
            (4_096, 0, 0),
            (4_096, 1, 0),
            (4_096, 3, 2 * 2_048),
            (4_096, 5, 4 * 2_048),
            (2_048, 0, 0),
            (2_048, 1, 2_048),  # a smaller buffer leaves more to the overflow
            (2_048, 3, 3 * 2_048),
            (10_240, 3, 0),
        ],
    )
    def test_hot_and_overflow_rows_hold_the_union_of_all_query_rows(
        self, hot_rows: int, drafts: int, overflow: int
    ) -> None:
        hot = HotSizes(GLM_TOPK, hot_rows, drafts)
        assert hot.overflow_rows == overflow
        assert hot.hot_rows + hot.overflow_rows >= (1 + drafts) * GLM_TOPK

    def test_overflow_is_rounded_up_to_blocks(self) -> None:
        plan = tiny_pools(500, topk=33, hot_rows=64, drafts=2)
        assert plan.hot.overflow_rows == 35
        assert plan.overflow_blocks == 3

    def test_hot_rows_are_whole_blocks(self) -> None:
        with pytest.raises(AssertionError):
            tiny_pools(500, hot_rows=65)


class TestSteadyState:
    def test_indexer_of_every_page_and_lease_and_tail(self) -> None:
        plan = glm_pools(17.8, 142_000)
        assert plan.steady_blocks(80_000) == 1_250 + 1_088 + 34

    def test_short_contexts_are_charged_as_resident(self) -> None:
        plan = glm_pools(17.8, 142_000)
        assert plan.steady_blocks(64) == 17
        assert plan.steady_blocks(65) == 34
        # The lease pays from the page on where 17 p > p + 1,122.
        assert plan.steady_blocks(70 * 64) == 70 * 17
        assert plan.steady_blocks(71 * 64) == 71 + 1_122

    def test_one_window_is_charged_for_all_requests_together(self) -> None:
        plan = glm_pools(17.8, 142_000, window_tokens=65_536)
        assert plan.window_blocks == 1_024 * 17
        room = plan.usable_blocks - 1_024 * 17
        assert plan.admission_concurrency(80_000) == room / 2_372
        assert plan.steady_concurrency(80_000) == plan.usable_blocks / 2_372

    def test_a_million_tokens_fit_17_8_gib(self) -> None:
        plan = glm_pools(17.8, GLM_MAX_POSITIONS, window_tokens=65_536)
        assert plan.resident_blocks(GLM_MAX_POSITIONS) > plan.usable_blocks
        assert plan.admission_blocks(GLM_MAX_POSITIONS) < plan.usable_blocks
        assert int(plan.steady_concurrency(GLM_MAX_POSITIONS)) == 5

    def test_a_request_that_fits_resident_needs_no_window_beside_it(self) -> None:
        plan = tiny_pools(500, window_tokens=1 << 20)
        assert plan.admission_blocks(512) == 32 * plan.device.frame_blocks

    @pytest.mark.parametrize("max_model_len", [83_000, 142_000])
    def test_at_least_50_requests_of_83k_with_mtp_3_in_24_5_gib(
        self, max_model_len: int
    ) -> None:
        plan = glm_pools(24.5, max_model_len)
        assert 50 <= plan.steady_concurrency(83_000) < 52
        assert plan.mixed_rows >= 50

    def test_a_hot_buffer_of_10240_rows_holds_fewer(self) -> None:
        large = HotSizes(GLM_TOPK, 10_240, 3)
        assert glm_pools(24.5, 83_000, large).steady_concurrency(83_000) < 34


class TestHotState:
    def test_bytes_by_slot_position_and_unit(self) -> None:
        plan = glm_pools(17.8, 142_000)
        positions = 2_219 * 64
        assert plan.hot_row_bytes == 22 * (4_096 * (4 + 2) + positions * 2)

    def test_rows_are_the_leases_that_fit(self) -> None:
        plan = tiny_pools(500, hot_rows=64)
        assert plan.lease_blocks == 28
        assert plan.mixed_rows == 8  # max_num_seqs
        assert tiny_pools(1 + 28 * 3).mixed_rows == 3
        assert tiny_pools(28 * 3).mixed_rows == 2
        assert tiny_pools(2).mixed_rows == 1

    @pytest.mark.parametrize("max_model_len", [83_000, 142_000, GLM_MAX_POSITIONS])
    def test_at_most_two_percent_of_the_pool(self, max_model_len: int) -> None:
        plan = glm_pools(24.5, max_model_len)
        rows = plan.mixed_rows * plan.hot_row_bytes
        assert rows <= 0.02 * plan.device_bytes
        # ... which still lets all mixed requests of that length be mixed.
        assert plan.mixed_rows >= plan.steady_concurrency(max_model_len)

    @pytest.mark.parametrize("kv_gib", [1.0, 17.8, 24.5, 100.0])
    @pytest.mark.parametrize("max_model_len", [4_096, 142_000, GLM_MAX_POSITIONS])
    def test_what_is_set_aside_pays_for_the_bookkeeping(
        self, kv_gib: float, max_model_len: int
    ) -> None:
        plan = glm_pools(kv_gib, max_model_len)
        assert plan.device_bytes + plan.bookkeeping_bytes <= kv_gib * GIB

    def test_no_room_at_all_gives_no_blocks(self) -> None:
        assert glm_pools(0, 4_096).num_blocks == 0


class TestCapacity:
    def test_384_gib_hold_7_53_million_tokens(self) -> None:
        plan = glm_pools(24.5, 83_000)
        assert plan.host_tokens == 7_533_824
        assert plan.host_bytes <= 384 * GIB < plan.host_bytes + 3_502_592

    def test_device_tokens_are_whole_frames(self) -> None:
        assert tiny_pools(1 + 8 * 10).device_tokens == 160
        assert tiny_pools(8 * 10).device_tokens == 144
