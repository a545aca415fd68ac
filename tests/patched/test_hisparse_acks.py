# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Acknowledgements of several ranks reach the scheduler in vLLM's aggregated output."""

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.hisparse.glue.connector import HiSparseAcks
from vllm.v1.hisparse.glue.manager import HiSparseManager
from vllm.v1.hisparse.glue.worker import HiSparseWorker
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
    return meta.done


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
    acks = [HiSparseAcks({5: {0}}), HiSparseAcks({6: {1}}, failed={5: {1}})]
    united = acks[first].aggregate(acks[1 - first])
    assert isinstance(united, HiSparseAcks)
    assert united.done == {5: {0}, 6: {1}} and united.failed == {5: {1}}


def test_pages_of_one_step_are_given_back_tail_first() -> None:
    """So that the heads of prefixes stay longest in the host pool."""
    calls: list = []
    manager = object.__new__(HiSparseManager)
    manager.residency = SimpleNamespace(
        acknowledge=lambda transfer_id, ranks: calls.append(transfer_id)
    )
    manager.acknowledge({3: {0}, 5: {0}, 4: {0}}, {})
    assert calls == [5, 4, 3]


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_ended_one_copy_of_a_step_has_not_ended_the_others(
    fails: bool,
) -> None:
    """Each copy has a set of its own, from the worker on."""
    worker = object.__new__(HiSparseWorker)
    worker.rank = 0
    ended = ([], [1, 2]) if fails else ([1, 2], [])
    worker.copier = SimpleNamespace(poll=lambda: ended)
    theirs = {2: {1}}
    other = HiSparseAcks(failed=theirs) if fails else HiSparseAcks(theirs)
    united = HiSparseAcks(*worker.take_acks()).aggregate(other)
    found = united.failed if fails else united.done
    assert found == {1: {0}, 2: {0, 1}}
