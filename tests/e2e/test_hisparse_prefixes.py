# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Prefix hits on host pages: what is recomputed, shared and announced (D9, D15, R7)."""

from typing import Any

import pytest

from engines import Engine, Engines
from test_hisparse_exactness import (
    CONNECTOR,
    FORMATS,
    PROMPTS,
    evict_all,
    small_budget,
)

PAGE = 16


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Engine:
    return engines.get(**small_budget("fp32", PAGE), **CONNECTOR)


@pytest.fixture(scope="module")
def oracle(engines: Engines) -> Engine:
    return engines.get(**FORMATS["fp32"])


def scheduled_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Tokens of each request in each step from now on."""
    steps: list[dict] = []
    scheduler = engine.core.scheduler
    schedule = scheduler.schedule

    def recorded(*args, **kwargs):
        output = schedule(*args, **kwargs)
        steps.append(dict(output.num_scheduled_tokens))
        return output

    monkeypatch.setattr(scheduler, "schedule", recorded)
    return steps


def to_host_only(engine: Engine) -> None:
    """Pressure while nobody runs: every clean frame goes."""
    for _ in range(3):
        engine.llm.llm_engine.step()
    evict_all(engine.residency)
    assert not engine.residency._pages


def test_a_second_turn_recomputes_the_unsealed_tail_only(
    engine: Engine, oracle: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = list(range(10, 161))
    assert engine.llm.reset_prefix_cache()
    (answer,) = engine.generate([first], 10, forget=False)
    # The last token of an answer is never written.
    kept = (len(first) + 10 - 1) // PAGE * PAGE
    to_host_only(engine)
    second = [*first, *answer.tokens, *range(20, 43)]
    steps = scheduled_tokens(engine, monkeypatch)
    (got,) = engine.generate([second], 10, forget=False)
    assert got.num_cached_tokens == kept
    computed = next(sum(step.values()) for step in steps if step)
    assert computed == len(second) - kept
    (want,) = oracle.generate([second], 10)
    assert got.same_output(want)
    engine.assert_drained()


def test_hits_are_counted_by_where_the_pages_were(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [4 + (23 * i) % 250 for i in range(5 * PAGE + 3)]
    assert engine.llm.reset_prefix_cache()
    scheduler = engine.core.scheduler
    make_stats, hits = scheduler.make_stats, {"device": 0, "host": 0}

    def recorded(*args, **kwargs):
        stats = make_stats(*args, **kwargs)
        for where in hits:
            name = f"prefix_pages_{where}"
            hits[where] += (stats.kv_connector_stats or {}).get(name, 0)
        return stats

    engine.generate([prompt], 2, forget=False)
    monkeypatch.setattr(scheduler, "make_stats", recorded)
    to_host_only(engine)
    found = []
    for _ in range(2):
        engine.generate([prompt], 2, forget=False)
        found.append(dict(hits))
    assert found == [{"device": 0, "host": 5}, {"device": 5, "host": 5}]


def test_a_preempted_request_resumes_from_its_pages(
    engine: Engine, oracle: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a chunked prefill, and again while it decodes."""
    prompt = [4 + (11 * i) % 250 for i in range(290)]
    assert engine.llm.reset_prefix_cache()
    steps = scheduled_tokens(engine, monkeypatch)
    scheduler = engine.core.scheduler
    computed: list[int] = []

    def preempt_sometimes() -> None:
        if len(steps) in (2, 6) and scheduler.running:
            request = scheduler.running.pop()
            computed.append(request.num_computed_tokens)
            scheduler._preempt_request(request, 0.0)
            evict_all(engine.residency)

    (got,) = engine.generate([prompt], 12, forget=False, each_step=preempt_sometimes)
    assert len(computed) == 2 and 128 < computed[0] < len(prompt) < computed[1]
    total = sum(sum(step.values()) for step in steps)
    # What is not sealed yet is lost, and the last token of a full hit.
    assert total - (len(prompt) + 11) <= 2 * (PAGE + 1), (total, computed)
    (want,) = oracle.generate([prompt], 12)
    assert got.same_output(want)
    engine.assert_drained()


def test_two_equal_prompts_of_one_step_are_prefilled_once(
    engine: Engine, oracle: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [4 + (17 * i) % 250 for i in range(100)]
    assert engine.llm.reset_prefix_cache()
    steps = scheduled_tokens(engine, monkeypatch)
    both = engine.generate([prompt, prompt], 6, forget=False)
    assert sum(steps[0].values()) == 100 + (100 - 100 // PAGE * PAGE)
    (want,) = oracle.generate([prompt], 6)
    assert all(got.same_output(want) for got in both)
    engine.assert_drained()


def test_samples_of_one_prompt_share_its_pages(engine: Engine, oracle: Engine) -> None:
    from vllm import SamplingParams

    prompt = [4 + (19 * i) % 250 for i in range(90)]
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=12, logprobs=0)
    outputs = []
    for each in (engine, oracle):
        assert each.llm.reset_prefix_cache()
        (output,) = each.llm.generate(
            [{"prompt_token_ids": prompt}], params, use_tqdm=False
        )
        outputs.append([(o.token_ids, o.cumulative_logprob) for o in output.outputs])
    assert outputs[0] == outputs[1]
    engine.assert_drained()


@pytest.mark.parametrize("length", [150, 155])
def test_a_turn_goes_on_from_an_answer_that_stopped_within_the_steps_in_flight(
    engines: Engines, oracle: Engine, length: int
) -> None:
    """In the middle of a page, and where only the step in flight would fill one."""
    from vllm import SamplingParams

    engine = engines.get(
        **small_budget("fp32", PAGE), **CONNECTOR, async_scheduling=True
    )
    first = [4 + (31 * i + i * i // 5) % 250 for i in range(length)]
    (answer,) = oracle.generate([first], 5)
    stop = answer.tokens[4]
    assert stop not in answer.tokens[:4]
    assert engine.llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=50, stop_token_ids=[stop])
    (output,) = engine.llm.generate(
        [{"prompt_token_ids": first}], params, use_tqdm=False
    )
    assert tuple(output.outputs[0].token_ids) == answer.tokens
    to_host_only(engine)
    second = [*first, *answer.tokens, *range(20, 43)]
    (got,) = engine.generate([second], 10, forget=False)
    (want,) = oracle.generate([second], 10)
    assert got.num_cached_tokens >= length // PAGE * PAGE
    assert got.same_output(want)
    engine.assert_drained()


def test_salt_separates_prefixes(engine: Engine) -> None:
    prompt = PROMPTS[0]
    assert engine.llm.reset_prefix_cache()
    cached = []
    for salt in ("a", "b", "a"):
        (output,) = engine.llm.generate(
            [{"prompt": prompt, "cache_salt": salt}], use_tqdm=False
        )
        cached.append(output.num_cached_tokens)
    assert cached[:2] == [0, 0] and cached[2] > 0
    engine.assert_drained()


def test_prompt_logprobs_read_no_cache_and_are_equal(
    engine: Engine, oracle: Engine
) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)
    found = []
    for each in (engine, oracle):
        each.generate([PROMPTS[0]], 2)
        (output,) = each.llm.generate([PROMPTS[0]], params, use_tqdm=False)
        assert output.num_cached_tokens == 0
        found.append(
            [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
        )
    assert found[0] == found[1]


def test_events_say_that_pages_are_in_main_memory(engine: Engine) -> None:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    pool = engine.core.scheduler.kv_cache_manager.block_pool
    pool.enable_kv_cache_events = True
    try:
        assert engine.llm.reset_prefix_cache()
        manager = engine.core.scheduler.kv_cache_manager
        manager.take_events()
        events, take_events = [], manager.take_events

        def recorded():
            events.extend(taken := take_events())
            return taken

        manager.take_events = recorded
        engine.generate([PROMPTS[0]], 20, forget=False)
    finally:
        del manager.take_events
        pool.enable_kv_cache_events = False
    stored = [e for e in events if isinstance(e, (BlockStored, BlockRemoved))]
    assert stored and {event.medium for event in stored} == {"CPU"}


def test_a_reset_that_is_refused_changes_nothing(
    engine: Engine, oracle: Engine
) -> None:
    """One request runs on; another has just finished, its pages not copied yet."""
    from vllm import SamplingParams

    long, short = [5 + i % 200 for i in range(200)], [7 + i % 90 for i in range(40)]
    assert engine.llm.reset_prefix_cache()
    core = engine.llm.llm_engine
    for name, prompt, tokens in (("900001", long, 40), ("900002", short, 1)):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        core.add_request(name, {"prompt_token_ids": prompt}, params)
    while not any(o.request_id == "900002" and o.finished for o in core.step()):
        pass
    assert engine.residency.num_pending > 0
    assert not engine.llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    core.add_request("900003", {"prompt_token_ids": short}, params)
    done: dict[str, Any] = {}
    while core.has_unfinished_requests():
        done.update((o.request_id, o) for o in core.step() if o.finished)
    (want,) = oracle.generate([short], 6)
    assert done["900003"].num_cached_tokens == 32
    assert tuple(done["900003"].outputs[0].token_ids) == want.tokens
    engine.assert_drained()


def test_a_reset_does_not_wait_for_copies(engine: Engine, oracle: Engine) -> None:
    engine.delay_copies(6)
    try:
        assert engine.llm.reset_prefix_cache()
        engine.generate([PROMPTS[0]], 3, forget=False)
        assert engine.residency.num_pending > 0
        assert engine.llm.reset_prefix_cache()
        (got,) = engine.generate([PROMPTS[0]], 6, forget=False)
    finally:
        engine.delay_copies(0)
    (want,) = oracle.generate([PROMPTS[0]], 6)
    assert got.num_cached_tokens == 0 and got.same_output(want)
    for _ in range(3):
        engine.generate([PROMPTS[1]], 4, forget=False)
    engine.assert_drained()


def test_a_second_engine_of_a_process_is_refused(engine: Engine) -> None:
    connector = engine.runner.kv_connector.kv_connector
    with pytest.raises(RuntimeError, match="a second engine in one process"):
        connector.register_kv_caches({})
