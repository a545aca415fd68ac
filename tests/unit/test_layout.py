# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Geometry of the device pool and of host pages (D7, D10)."""

import pickle
from dataclasses import replace

import pytest
from hisparse_core.layout import DevicePlan, IndexerLayer, plan_device

from geometry import glm_leaders, glm_plan, layers


class TestGlm:
    def test_config_gives_21_leaders(self) -> None:
        leaders = glm_leaders()
        assert len(leaders) == 21
        assert leaders[:5] == [0, 1, 2, 6, 10]
        assert leaders[-1] == 74

    def test_hopper_fp8_rows_with_the_mtp_layer(self) -> None:
        plan = glm_plan(656)
        assert (plan.layers_per_stack, plan.num_stacks) == (5, 16)
        assert plan.block_bytes == 209_920
        assert plan.resident_token_bytes == 55_760
        assert plan.ideal_token_bytes == 54_728
        assert plan.host_page_bytes == 3_502_592
        assert plan.rows_per_block == 320
        assert (len(plan.latents), len(plan.indexers), len(plan.units)) == (79, 22, 22)

    @pytest.mark.parametrize(
        "row_bytes, shape, token_bytes",
        [
            (576, (5, 16, 186_048), 49_419),
            (1_152, (4, 20, 294_912), 96_768),
        ],
    )
    def test_other_rows(
        self, row_bytes: int, shape: tuple[int, int, int], token_bytes: int
    ) -> None:
        plan = glm_plan(row_bytes)
        found = plan.layers_per_stack, plan.num_stacks, plan.block_bytes
        assert found == shape
        assert plan.resident_token_bytes == token_bytes
        assert plan.resident_token_bytes <= 1.05 * plan.ideal_token_bytes

    @pytest.mark.parametrize("row_bytes", [576, 656, 1_152])
    def test_without_the_mtp_layer_padding_stays_below_5_percent(
        self, row_bytes: int
    ) -> None:
        plan = glm_plan(row_bytes, mtp=False)
        assert plan.resident_token_bytes <= 1.05 * plan.ideal_token_bytes
        assert (len(plan.latents), len(plan.units)) == (78, 21)

    def test_units_are_leader_and_followers(self) -> None:
        plan = glm_plan(656)
        members = [unit.latents for unit in plan.units]
        assert members[:4] == [(0,), (1,), (2, 3, 4, 5), (6, 7, 8, 9)]
        assert members[-2:] == [(74, 75, 76, 77), (78,)]

    def test_a_unit_names_the_stacks_its_layers_lie_in(self) -> None:
        plan = glm_plan(656)
        # Layers 2..5 cross the border of stacks 0 (0..4) and 1 (5..9).
        assert plan.units[2].stacks == (0, 1)
        assert plan.units[3].stacks == (1,)
        assert max(len(unit.stacks) for unit in plan.units) == 2


SHAPES = [
    (79, glm_leaders() + [78], 656, 64),
    (62, list(range(62)), 656, 64),  # DeepSeek V3.2 with its MTP layer
    (61, list(range(61)), 576, 64),
    (62, list(range(62)), 1_152, 64),
    (7, [0, 1, 5, 6], 2_304, 16),  # the tiny GLM, fp32
    (7, [0, 1, 5, 6], 2_304, 64),
    (7, [0, 1, 5, 6], 656, 16),
    (7, [0, 1, 5, 6], 1_152, 32),
    (1, [0], 656, 64),
    (1, [0], 2_304, 16),
    (3, [0], 656, 64),
]


@pytest.fixture(params=SHAPES, ids=lambda s: f"{s[0]}x{s[2]}B-{s[3]}")
def plan(request: pytest.FixtureRequest) -> DevicePlan:
    num_latents, leaders, row_bytes, block_size = request.param
    return plan_device(*layers(num_latents, leaders, row_bytes), block_size)


class TestAnyPlan:
    def test_block_is_whole_rows_and_aligned(self, plan: DevicePlan) -> None:
        assert plan.block_bytes % plan.row_bytes == 0
        assert plan.block_bytes % 16 == 0
        assert plan.rows_per_block * plan.row_bytes == plan.block_bytes

    def test_pages_of_a_block_lie_side_by_side_inside_it(
        self, plan: DevicePlan
    ) -> None:
        for stack in range(plan.num_stacks):
            offsets = [p.byte_offset for p in plan.stack_latents(stack)]
            assert offsets == [i * plan.latent_page_bytes for i in range(len(offsets))]
            assert offsets[-1] + plan.latent_page_bytes <= plan.block_bytes
        offsets = [p.byte_offset for p in plan.indexers]
        assert offsets == [i * plan.indexer_page_bytes for i in range(len(offsets))]
        assert offsets[-1] + plan.indexer_page_bytes <= plan.block_bytes

    def test_every_latent_has_one_place(self, plan: DevicePlan) -> None:
        assert len({(p.stack, p.index) for p in plan.latents}) == len(plan.latents)
        assert all(p.index < plan.layers_per_stack for p in plan.latents)
        stacks = [plan.stack_latents(g) for g in range(plan.num_stacks)]
        assert [p for stack in stacks for p in stack] == list(plan.latents)
        assert all(p.stack == g for g, ps in enumerate(stacks) for p in ps)
        assert all(stacks)

    def test_no_other_number_of_layers_per_stack_is_better(
        self, plan: DevicePlan
    ) -> None:
        indexers = len(plan.indexers) * plan.indexer_page_bytes
        best = (plan.frame_blocks * plan.block_bytes, plan.num_stacks)
        for r in range(1, len(plan.latents) + 1):
            block = max(indexers, r * plan.latent_page_bytes)
            while block % plan.row_bytes or block % 16:
                block += 1
            stacks = (len(plan.latents) + r - 1) // r
            assert best <= ((1 + stacks) * block, stacks)

    def test_units_cover_every_latent_once_in_order(self, plan: DevicePlan) -> None:
        assert [i for unit in plan.units for i in unit.latents] == list(
            range(len(plan.latents))
        )
        for u, unit in enumerate(plan.units):
            assert unit.leader == u
            assert plan.indexers[u].layer == plan.latents[unit.latents[0]].layer
            assert all(plan.latents[i].unit == u for i in unit.latents)
            assert unit.stacks == tuple(
                sorted({plan.latents[i].stack for i in unit.latents})
            )

    def test_host_tensors_are_dense_and_layer_outermost(self, plan: DevicePlan) -> None:
        num_pages = 3_000_001
        offsets = plan.host_layer_offsets(num_pages)
        end = 0
        for layer, offset in zip(plan.host_layers, offsets, strict=True):
            assert offset == end
            assert offset % 16 == 0
            end = offset + num_pages * layer.page_bytes
        assert end == num_pages * plan.host_page_bytes
        names = [p.name for p in plan.latents] + [p.name for p in plan.indexers]
        assert [layer.name for layer in plan.host_layers] == names

    def test_plan_is_a_value(self, plan: DevicePlan) -> None:
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert hash(plan) == hash(replace(plan))


def test_one_indexer_for_each_latent_gives_units_of_one() -> None:
    plan = plan_device(*layers(62, range(62), 656), 64)
    assert [unit.latents for unit in plan.units] == [(i,) for i in range(62)]
    assert all(len(unit.stacks) == 1 for unit in plan.units)
    assert plan.block_bytes >= 62 * 64 * 132


def test_ties_go_to_fewer_stacks() -> None:
    # R=3, G=27 and R=4, G=20 cost the same 6,193,152 bytes a page.
    plan = glm_plan(1_152)
    assert 28 * 221_184 == 21 * 294_912 == plan.frame_blocks * plan.block_bytes
    assert plan.num_stacks == 20


class TestRefusals:
    @pytest.mark.parametrize("row_bytes", [0, 8, 584, 650])
    def test_rows_not_a_multiple_of_16_bytes(self, row_bytes: int) -> None:
        with pytest.raises(ValueError, match=rf"{row_bytes} bytes.*multiples of 16"):
            plan_device(*layers(2, [0], row_bytes), 64)

    def test_indexer_pages_not_a_multiple_of_16_bytes(self) -> None:
        with pytest.raises(ValueError, match="indexer pages of 132 bytes"):
            plan_device(*layers(2, [0], 656), 1)

    def test_layer_before_the_first_indexer(self) -> None:
        with pytest.raises(ValueError, match=r"layers\.0\.attn has no indexer"):
            plan_device(*layers(3, [1], 656), 64)

    def test_indexer_without_a_latent(self) -> None:
        with pytest.raises(ValueError, match=r"layers\.9\.indexer belongs to no"):
            plan_device(*layers(3, [0, 9], 656), 64)

    def test_no_indexers(self) -> None:
        with pytest.raises(ValueError, match="3 MLA latent layers and 0 indexer"):
            plan_device(*layers(3, [], 656), 64)

    def test_rows_of_two_sizes(self) -> None:
        latents, indexers = layers(3, [0], 656)
        latents[2] = replace(latents[2], row_bytes=1_152)
        with pytest.raises(ValueError, match=r"rows of \[656, 1152\] bytes"):
            plan_device(latents, indexers, 64)

    def test_indexers_of_two_sizes(self) -> None:
        latents, indexers = layers(3, [0], 656)
        indexers.append(IndexerLayer("layers.1.indexer", 1, 68))
        with pytest.raises(ValueError, match=r"\[68, 132\] bytes in the indexer"):
            plan_device(latents, indexers, 64)

    def test_layers_out_of_order(self) -> None:
        latents, indexers = layers(3, [0], 656)
        with pytest.raises(ValueError, match="out of model order"):
            plan_device(latents[::-1], indexers, 64)
