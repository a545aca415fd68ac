# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Acknowledgements of several ranks reach the scheduler in vLLM's aggregated output.

And what it does about restores that failed.
"""

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.hisparse.glue.connector import HiSparseAcks
from vllm.v1.hisparse.glue.manager import HiSparseManager
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput


def output(acks: dict[int, set[int]] | None) -> ModelRunnerOutput:
    """What one rank returns for a step; None where no copy of it completed."""
    meta = None if acks is None else HiSparseAcks(acks)
    return ModelRunnerOutput(
        req_ids=[],
        req_id_to_index={},
        kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=meta),
    )


def aggregated(*acks: dict[int, set[int]] | None) -> dict[int, set[int]]:
    aggregator = KVOutputAggregator(expected_finished_count=len(acks))
    result = aggregator.aggregate([output(rank) for rank in acks])
    assert result is not None and result.kv_connector_output is not None
    meta = result.kv_connector_output.kv_connector_worker_meta
    assert isinstance(meta, HiSparseAcks)
    return meta.ranks


def test_ranks_that_completed_in_one_step_are_united() -> None:
    """Copies 1 and 3 lack a rank, copy 2 has both."""
    ranks = aggregated({1: {0}, 2: {0}}, {2: {1}, 3: {1}})
    assert ranks == {1: {0}, 2: {0, 1}, 3: {1}}


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_without_completions_hides_no_other(late: int) -> None:
    acks: list[dict[int, set[int]] | None] = [{5: {0}}, {5: {1}}]
    acks[late] = None
    assert aggregated(*acks) == {5: {1 - late}}


@pytest.mark.parametrize("first", [0, 1])
def test_a_copy_that_failed_on_one_rank_has_failed(first: int) -> None:
    acks = [HiSparseAcks({5: {0}}), HiSparseAcks({6: {1}}, failed={5})]
    united = acks[first].aggregate(acks[1 - first])
    assert isinstance(united, HiSparseAcks)
    assert united.ranks == {5: {0}, 6: {1}} and united.failed == {5}


# --- restores that failed -----------------------------------------------------------


class World:
    """A scheduler with requests, of which some read lost pages.

    Attributes:
        calls: What was asked of scheduler and residency, in order.
    """

    def __init__(self, running: str, readers: str, stale: str = "") -> None:
        self.calls: list = []
        self.requests = {
            name: SimpleNamespace(
                request_id=name,
                num_stale_output_tokens=int(name in stale),
                drop_stale_output=False,
            )
            for name in running + stale
        }
        self.running = [self.requests[name] for name in running]
        self.manager = object.__new__(HiSparseManager)
        self.manager.residency = SimpleNamespace(
            spoil=lambda pages, names: set(readers) & names,
            lose=lambda pages: self.calls.append(("lose", pages)),
        )

    def _preempt_request(self, request, timestamp, drop_stale_output=False) -> None:
        self.calls.append((request.request_id, drop_stale_output))

    def recompute(self, scheduled: str) -> set[str]:
        return self.manager.recompute(self, {7}, list(scheduled))


def test_readers_of_lost_pages_are_preempted_and_keep_their_order() -> None:
    """With their tokens in flight, also of a step after the one that restored."""
    world = World(running="abcd", readers="bd")
    assert world.recompute(scheduled="ab") == {"b", "d"}
    assert world.calls == [("d", True), ("b", True), ("lose", {7})]
    assert [request.request_id for request in world.running] == ["a", "c"]


def test_a_request_that_was_preempted_meanwhile_loses_its_tokens_in_flight() -> None:
    """What it read in the step is not known any more."""
    world = World(running="a", readers="", stale="pq")
    assert world.recompute(scheduled="apx") == {"p"}
    dropped = {n for n, request in world.requests.items() if request.drop_stale_output}
    assert dropped == {"p"}
