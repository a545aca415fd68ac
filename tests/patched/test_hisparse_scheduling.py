# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What vLLM's scheduler decides with HiSparse's manager, step by step."""

import pytest

pytest.importorskip("vllm", reason="needs the patched vLLM")

from vllm.v1.core.sched.request_queue import (  # noqa: E402
    SchedulingPolicy,
    create_request_queue,
)
from vllm.v1.hisparse.integrity import check_integrity  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from bare_server import PAGE, PROMPT, Server  # noqa: E402


def test_a_request_that_is_not_admitted_has_no_claim(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others need for their steady state is not taken for it."""
    server.serve(PROMPT)
    server.add(PROMPT)
    server.step(ends=False)
    assert server.residency._claims
    with monkeypatch.context() as patch:
        patch.setattr(server.residency, "can_admit", lambda num_pages: False)
        server.step(ends=False)
        assert not server.residency._claims
    server.step(ends=False)
    assert server.residency._claims and not server.scheduler.running
    assert server.serve(PROMPT) == 5 * PAGE


def test_a_running_request_that_gets_more_input_is_counted_with_it(
    server: Server,
) -> None:
    """As a session does, whose prompt comes in pieces."""
    server.add(PROMPT)
    server.step()
    (name,) = server.scheduler.requests
    assert server.residency._promised_pages == 6
    manager = server.scheduler.kv_cache_manager.hisparse
    gate = {"apply_admission_cap": True}
    assert manager.get_num_blocks_to_allocate(
        name, 20 * PAGE, [], len(PROMPT), 0, 20 * PAGE, **gate
    )
    assert server.residency._promised_pages == 20
    assert server.serve(PROMPT) == 5 * PAGE and not server.residency._promised_pages


def test_nobody_overtakes_a_request_whose_pages_come_from_the_host(
    server: Server,
) -> None:
    """They could take its room again and again."""
    server.serve(PROMPT)
    server.add(PROMPT)
    server.add([9] * 5)
    server.step()
    assert not server.scheduler.running and len(server.residency._claims) == 1
    server.step()
    assert len(server.scheduler.running) == 2 and not server.residency._claims
    assert server.serve(PROMPT) == 5 * PAGE


def test_one_long_step_is_not_a_copy_that_hangs(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that ended meanwhile are only known after the next step."""
    manager = server.scheduler.kv_cache_manager.hisparse
    now = [0.0]
    monkeypatch.setattr(manager, "_clock", lambda: now[0])
    monkeypatch.setattr(manager, "_seen", 0.0)
    server.serve(PROMPT)
    server.add(PROMPT)
    for _ in range(2):
        server.step(ends=False)
    now[0] += 1_000
    for _ in range(7):
        server.step(ends=False)
    assert not server.residency.transfers.stalled
    for _ in range(9):
        now[0] += 1_000
        server.step(ends=False)
    assert server.residency.transfers.stalled


def test_a_reset_that_is_refused_for_blocks_in_flight_changes_nothing(
    server: Server,
) -> None:
    server.serve(PROMPT)
    server.add(PROMPT)
    server.step()
    assert server.residency._claims
    pool = server.scheduler.kv_cache_manager.block_pool
    blocks = pool.get_new_blocks(1)  # as those of an aborted request in flight
    pages = dict(server.residency._pages)
    assert not server.scheduler.reset_prefix_cache()
    assert server.residency._claims and server.residency._pages == pages
    pool.free_blocks(blocks)
    assert server.scheduler.reset_prefix_cache()
    assert not server.residency._claims and not server.residency._pages


LONG = [4 + (11 * i) % 250 for i in range(8 * PAGE)]


@pytest.fixture
def chunked(server: Server) -> Server:
    """Prompts come in chunks of two pages."""
    server.scheduler.scheduler_config.long_prefill_token_threshold = 2 * PAGE
    return server


def is_denied(
    server: Server, patch: pytest.MonkeyPatch, name: str, copies: bool
) -> None:
    """Let the device have no room for a request.

    Args:
        server: Where it runs.
        patch: For how long.
        name: The request.
        copies: Whether copies under way may make some.
    """
    residency = server.residency
    can_start = residency.can_start
    patch.setattr(
        residency, "can_start", lambda *args: args[0] != name and can_start(*args)
    )
    patch.setattr(residency, "may_gain_room", lambda: copies)


def one_runs_and_one_waits(chunked: Server) -> tuple[str, str]:
    """A request that needs pages in its next step, and one that could start in it."""
    first = chunked.add(LONG)
    chunked.step()
    return first, chunked.add([9] * 5)


def test_nobody_starts_in_a_step_in_which_a_running_request_waits_for_room(
    chunked: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer ones could take every block that it waits for."""
    first, second = one_runs_and_one_waits(chunked)
    with monkeypatch.context() as patch:
        is_denied(chunked, patch, first, copies=True)
        for _ in range(3):
            output = chunked.begin()
            assert not output.num_scheduled_tokens
            chunked.end(output)
    assert chunked.begin().num_scheduled_tokens == {first: 2 * PAGE, second: 5}


def test_nobody_starts_while_a_running_request_waits_for_host_pages(
    chunked: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = one_runs_and_one_waits(chunked)
    pool = chunked.scheduler.kv_cache_manager.block_pool
    others = pool.get_new_blocks(pool.get_num_free_blocks() - 1)
    monkeypatch.setattr(chunked.residency, "may_gain_room", lambda: True)
    output = chunked.begin()
    assert not output.num_scheduled_tokens
    chunked.end(output)
    pool.free_blocks(others)
    assert chunked.begin().num_scheduled_tokens == {first: 2 * PAGE, second: 5}


def test_pages_of_a_step_that_a_request_is_preempted_in_are_found_by_nobody(
    chunked: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By priority one is preempted that the step has scheduled: it will not run."""
    scheduler = chunked.scheduler
    scheduler.policy = SchedulingPolicy.PRIORITY
    scheduler.waiting = create_request_queue(scheduler.policy)
    victim = chunked.add(LONG, priority=5)
    chunked.step()
    urgent = chunked.add(LONG[::-1], priority=0)
    chunked.step()
    with monkeypatch.context() as patch:
        is_denied(chunked, patch, urgent, copies=False)
        output = chunked.begin()
    assert victim in output.preempted_req_ids and not output.num_scheduled_tokens
    # Four pages and two were computed before.
    pool = scheduler.kv_cache_manager.block_pool
    assert len(pool.cached_block_hash_to_block) == 6
    assert len(chunked.residency._pages) == 6
    chunked.end(output)
    chunked.begin()
    computed = {r.request_id: r.num_computed_tokens for r in scheduler.running}
    assert computed == {urgent: 4 * PAGE, victim: 6 * PAGE}


def test_all_is_reset_while_a_step_is_in_flight(server: Server) -> None:
    server.scheduler.defer_block_free = True  # as with asynchronous scheduling
    name = server.add(LONG)
    output = server.begin()
    assert server.scheduler.reset_prefix_cache(reset_running_requests=True)
    server.end(output)
    check_integrity(server.residency)
    assert not server.scheduler.deferred_frees
    again = server.begin()
    assert again.num_scheduled_tokens == {name: len(LONG)}
    server.end(again)
    assert server.serve(LONG) == 7 * PAGE


def test_a_reset_is_refused_for_published_pages_of_a_step_in_flight(
    server: Server,
) -> None:
    """They wait to be written back, too: there are as many of them as of copies."""
    server.scheduler.defer_block_free = True
    name = server.add(LONG)
    output = server.begin()
    server.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    pages = dict(server.residency._pages)
    assert len(pages) == server.residency.num_pending == 8
    assert not server.scheduler.reset_prefix_cache()
    assert server.residency._pages == pages
    server.end(output)
    assert server.scheduler.reset_prefix_cache() and not server.residency._pages
