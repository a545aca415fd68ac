# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""In-process engines of the patched vLLM, shared between tests.

Importing vLLM costs about ten seconds and an engine two, so the tests of one
process share both. Engines are keyed by their options and kept: a tiny model's
weights and cache are a few megabytes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from make_tiny_glm import make_tiny_glm

# As little memory as the tests need, the V2 runner's own defaults otherwise.
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "block_size": 64,
    "num_gpu_blocks_override": 128,
    "kv_cache_memory_bytes": 1 << 29,
    "enforce_eager": True,
    "disable_log_stats": False,
    "async_scheduling": False,
}


@dataclass(frozen=True)
class Generation:
    """One completion.

    Attributes:
        tokens: Generated token ids.
        logprobs: Log-probability of each.
        num_cached_tokens: Prompt tokens taken from the prefix cache.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_cached_tokens: int

    def same_output(self, other: "Generation") -> bool:
        """Whether tokens and log-probabilities are the same to the last bit."""
        return (self.tokens, self.logprobs) == (other.tokens, other.logprobs)


@dataclass(frozen=True)
class Step:
    """What the scheduler decided for one step that computes something.

    Attributes:
        running: Requests that run.
        held_back: Requests that wait although more tokens could have been scheduled:
            there is no memory for them.
        preempted: Requests that lost their place in it.
    """

    running: int
    held_back: int
    preempted: int


class Engine:
    """One `vllm.LLM`, with what tests ask of it.

    Attributes:
        llm: The `vllm.LLM`.
        steps: What its scheduler decided since the last `generate` began.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.steps: list[Step] = []
        scheduler = self.core.scheduler
        schedule = scheduler.schedule

        def schedule_and_record(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            if num_tokens := output.total_num_scheduled_tokens:
                has_room = num_tokens < scheduler.max_num_scheduled_tokens
                self.steps.append(
                    Step(
                        running=len(scheduler.running),
                        held_back=len(scheduler.waiting) if has_room else 0,
                        preempted=len(output.preempted_req_ids or ()),
                    )
                )
            return output

        scheduler.schedule = schedule_and_record

    @property
    def core(self) -> Any:
        """The in-process `EngineCore`."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def runner(self) -> Any:
        """The model runner of the only worker."""
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def layers(self) -> dict[str, Any]:
        """Attention layers and indexer caches by name, each with its `kv_cache`."""
        config = self.runner.vllm_config.compilation_config
        return config.static_forward_context

    # --- HiSparse -----------------------------------------------------------

    @property
    def residency(self) -> Any:
        """The scheduler's `Residency`."""
        return self.core.scheduler.kv_cache_manager.hisparse.residency

    @property
    def worker(self) -> Any:
        """The `HiSparseWorker` of the only rank."""
        connector = self.runner.kv_connector.kv_connector
        children = getattr(connector, "_connectors", [connector])  # MultiConnector
        return next(child.worker for child in children if hasattr(child, "worker"))

    @property
    def copier(self) -> Any:
        """The worker's `PageCopier`."""
        return self.worker.copier

    def delay_copies(
        self, steps: int, reorder: Callable[[list[int]], list[int]] = list
    ) -> None:
        """Let copies of both ways end so many steps later, in another order."""
        for queue in (self.copier.to_host, self.copier.to_device):
            queue.delay_steps, queue.reorder = steps, reorder

    @property
    def hot_misses(self) -> int:
        """Rows fetched from the host so far."""
        return int(self.worker.buffers.counters[..., 1].sum())

    def assert_drained(self) -> None:
        """No block, page, transfer or reference is left held."""
        from vllm.v1.hisparse.integrity import check_integrity

        engine, scheduler = self.llm.llm_engine, self.core.scheduler
        for _ in range(60):
            # vLLM gives pages of the last step back when it has seen its output.
            if not self.residency.num_pending and not scheduler.deferred_frees:
                break
            engine.step()
        check_integrity(self.residency)
        assert self.residency.num_pending == 0
        assert self.residency.num_free == self.residency.config.num_blocks - 1
        pool = scheduler.kv_cache_manager.block_pool
        held = {b.block_id: b.ref_cnt for b in pool.blocks[1:] if b.ref_cnt}
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, held

    def blocks_of_next(self, prompt: str) -> list[int]:
        """Block ids that `prompt` gets when it is prefilled from an empty cache.

        The request is run to its end; prefix caching leaves the blocks valid.
        """
        assert self.llm.reset_prefix_cache()
        engine = self.llm.llm_engine
        from vllm import SamplingParams

        engine.add_request("probe", prompt, SamplingParams(max_tokens=2))
        engine.step()
        manager = self.core.scheduler.kv_cache_manager
        (request_id,) = self.core.scheduler.requests
        (blocks,) = manager.get_block_ids(request_id)
        while engine.has_unfinished_requests():
            engine.step()
        return blocks

    def generate(
        self,
        prompts: list[Any],
        max_tokens: int = 16,
        *,
        forget: bool = True,
        each_step: Callable[[], None] | None = None,
    ) -> list[Generation]:
        """Generate greedily for all prompts in one batch.

        Args:
            prompts: Texts or lists of token ids.
            max_tokens: Tokens to generate for each, regardless of end-of-text.
            forget: Empty the prefix cache first.
            each_step: Called before each of the engine's steps.
        """
        from vllm import SamplingParams

        self.steps.clear()
        if forget:
            assert self.llm.reset_prefix_cache()
        if prompts and not isinstance(prompts[0], str):
            prompts = [{"prompt_token_ids": p} for p in prompts]
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=0, ignore_eos=True
        )
        with self._before_steps(each_step):
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [_generation(output) for output in outputs]

    @contextmanager
    def _before_steps(self, action: Callable[[], None] | None) -> Iterator[None]:
        if action is None:
            yield
            return
        engine = self.llm.llm_engine
        step = engine.step

        def step_after_action() -> Any:
            action()
            return step()

        engine.step = step_after_action
        try:
            yield
        finally:
            del engine.step

    def alone(self, prompts: list, max_tokens: int = 16) -> list[Generation]:
        """Generate for each prompt by itself, from an empty cache."""
        return [self.generate([prompt], max_tokens)[0] for prompt in prompts]

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the last `generate` began."""
        return sum(step.preempted for step in self.steps)

    def counter(self, name: str) -> int:
        """Current value of a Prometheus counter, summed over its labels.

        vLLM keeps the metrics of one engine for a process: those of older engines
        stand still.
        """
        return sum(m.value for m in self.llm.get_metrics() if m.name == name)


def _generation(output: Any) -> Generation:
    completion = output.outputs[0]
    tokens = tuple(completion.token_ids)
    chosen = zip(completion.logprobs, tokens, strict=True)
    return Generation(
        tokens=tokens,
        logprobs=tuple(step[token].logprob for step, token in chosen),
        num_cached_tokens=output.num_cached_tokens or 0,
    )


@contextmanager
def keep_async_scheduling() -> Iterator[None]:
    """Let the CPU platform keep asynchronous scheduling, which it switches off.

    It has no use for it, but the hazards that it brings are what the tests are for.
    """
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = original


class Engines:
    """Makes models and engines on first use and keeps them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, Path] = {}
        self._engines: dict[str, Engine] = {}

    def model(self, **options: Any) -> Path:
        """Folder of the tiny GLM with these options of `make_tiny_glm`."""
        key = repr(sorted(options.items()))
        if key not in self._models:
            path = self._folder / f"model-{len(self._models)}"
            make_tiny_glm(path, **options)
            self._models[key] = path
        return self._models[key]

    def get(self, model: dict[str, Any] | None = None, **options: Any) -> Engine:
        """The engine with these options.

        Args:
            model: Options of `make_tiny_glm`.
            **options: Options of `vllm.LLM` beside `DEFAULTS`.
        """
        key = repr((sorted((model or {}).items()), sorted(options.items())))
        if key not in self._engines:
            from vllm import LLM
            from vllm.distributed.kv_transfer import kv_transfer_state

            # vLLM keeps one connector for a process; each runner holds its own.
            kv_transfer_state._KV_CONNECTOR_AGENT = None
            with keep_async_scheduling():
                llm = LLM(str(self.model(**model or {})), **{**DEFAULTS, **options})
            self._engines[key] = Engine(llm)
        return self._engines[key]

    def end_workers(self) -> None:
        """End the worker processes of engines that have some.

        `EngineCore.shutdown` would take the groups of in-process engines with it.
        """
        for engine in self._engines.values():
            engine.core.model_executor.shutdown()
        self._engines.clear()
