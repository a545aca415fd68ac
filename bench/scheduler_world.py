# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""One variant of the scheduler, at GLM-5.3's block counts, in a process of its own.

`scheduler_cost.py` starts it and writes one line for each round it wants; each line
that comes back is JSON: first the numbers of requests that decode, one by one, then
what this process is. It also runs in a vLLM without the series, where HiSparse
cannot be on.
"""

import gc
import importlib.metadata
import importlib.util
import json
import os
import resource
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import vllm.config.vllm as vllm_config_module
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from tiny_glm.sizes import TinyGlmSizes, model_config  # noqa: E402

BLOCK_SIZE = 64
NUM_LATENTS = 79
LEADERS = [0, 1, 2, *range(6, 78, 4), 78]
PAGE_BYTES = BLOCK_SIZE * (NUM_LATENTS * 656 + len(LEADERS) * 132)
GIB = 1 << 30
PREFILL_TOKENS = 32_768  # of a step
# Device pool, as a multiple of what all contexts take.
DEVICE_SHARE = {"off": 1.5, "resident": 1.5, "mixed": 0.25}
BLOCK_BYTES = {"off": PAGE_BYTES, "resident": 209_920, "mixed": 209_920}


def specs() -> dict[str, KVCacheSpec]:
    """Cache specs of GLM-5.3 with its MTP layer, fp8_ds_mla rows."""
    found: dict[str, KVCacheSpec] = {}
    for layer in range(NUM_LATENTS):
        prefix = f"model.layers.{layer}.self_attn"
        common: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1}
        if layer in LEADERS:
            found[f"{prefix}.indexer.k_cache"] = MLAAttentionSpec(
                **common, head_size=132, dtype=torch.uint8
            )
        found[f"{prefix}.attn"] = MLAAttentionSpec(
            **common,
            head_size=576,
            dtype=torch.uint8,
            cache_dtype_str="fp8_ds_mla",
            state_content_bytes=656,
        )
    return found


def hisparse_options(host_bytes: int) -> dict[str, Any]:
    """Engine options that switch HiSparse on, whatever memory this machine has."""
    from vllm.v1.hisparse.glue import config

    vars(config)["available_ram_bytes"] = lambda: 1 << 60
    return {
        "kv_transfer_config": {
            "kv_connector": "HiSparseConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_pool_gib": host_bytes / GIB},
        }
    }


def make_scheduler(
    folder: Path, variant: str, num_requests: int, num_tokens: int, num_steps: int
) -> Scheduler:
    """A scheduler whose pools hold all requests.

    Args:
        folder: Where the model's configuration is written.
        variant: Key of DEVICE_SHARE.
        num_requests: Requests that run at once.
        num_tokens: Prompt tokens of each.
        num_steps: Steps that will be run beside the prompts' ones.
    """
    # Model runner V2's scheduler, also where the CPU platform has no Triton: nothing
    # is computed here.
    vllm_config_module.HAS_TRITON = True
    # The first request decodes while the others come in.
    max_tokens = num_tokens + num_steps + 64
    max_tokens += num_requests * prefill_steps(num_tokens, num_requests)
    config = {**model_config(TinyGlmSizes()), "max_position_embeddings": 1 << 20}
    config["index_topk"] = 2048
    (folder / "config.json").write_text(json.dumps(config))
    contexts = num_requests * (max_tokens // BLOCK_SIZE + 2) * PAGE_BYTES
    vllm_config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=max_tokens,
        max_num_batched_tokens=PREFILL_TOKENS,
        max_num_seqs=num_requests,
        block_size=BLOCK_SIZE,
        kv_cache_dtype="fp8_ds_mla",
        num_gpu_blocks_override=int(
            DEVICE_SHARE[variant] * contexts / BLOCK_BYTES[variant]
        ),
        **({} if variant == "off" else hisparse_options(2 * contexts)),
    ).create_engine_config()
    vllm_config.cache_config.kv_cache_layout = "LBNHC"
    (worker_config,) = get_kv_cache_configs(vllm_config, [specs()], [2 * contexts])
    vllm_config.cache_config.num_gpu_blocks = worker_config.num_blocks
    return Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=generate_scheduler_kv_cache_config([worker_config]),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(vllm_config),
    )


def step(scheduler: Scheduler) -> tuple[float, bool]:
    """One step: its CPU seconds without the worker's stand-in, and if it is quiet.

    A step is quiet if no request gets a page in it, and no page is written back.
    """
    start = time.thread_time()
    output = scheduler.schedule()
    scheduled = time.thread_time()
    ids = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request: i for i, request in enumerate(ids)},
        sampled_token_ids=[
            [7] if _is_computed(scheduler.requests[request]) else [] for request in ids
        ],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    num_copies = _acknowledge(output, result)
    is_quiet = not num_copies and not any(output.scheduled_cached_reqs.new_block_ids)
    resumed = time.thread_time()
    scheduler.update_from_output(output, result)
    return time.thread_time() - resumed + scheduled - start, is_quiet


def _is_computed(request: Request) -> bool:
    return request.num_computed_tokens >= request.num_tokens


def _acknowledge(output, result: ModelRunnerOutput) -> int:
    """Complete this step's write-backs, as a worker would some steps later."""
    if (metadata := output.kv_connector_metadata) is None:
        return 0
    from vllm.v1.hisparse.glue.connector import HiSparseAcks
    from vllm.v1.outputs import KVConnectorOutput

    done = {copy.transfer_id: {0} for copy in metadata.update.write_backs}
    result.kv_connector_output = KVConnectorOutput(
        kv_connector_worker_meta=HiSparseAcks(done)
    )
    return len(done)


def fill(scheduler: Scheduler, num_requests: int, num_tokens: int) -> Iterator[int]:
    """Add requests until all of them decode, all at the same offset into a page.

    Otherwise a page would be filled in every step, and none be quiet.

    Yields:
        How many requests decode.
    """
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    params = SamplingParams(max_tokens=1 << 20, ignore_eos=True)
    first: Request | None = None
    for number in range(num_requests):
        length = num_tokens
        if first is not None:
            others = first.num_tokens + prefill_steps(num_tokens, number)
            length -= (num_tokens + 1 - others) % BLOCK_SIZE
        request = Request(
            f"r{number}", [number] * length, params, None, block_hasher=hasher
        )
        first = first or request
        scheduler.add_request(request)
        while not request.num_output_tokens:
            step(scheduler)
        yield number + 1


def prefill_steps(num_tokens: int, num_decoding: int) -> int:
    """Steps of a prompt beside so many requests that decode."""
    return -(-num_tokens // (PREFILL_TOKENS - num_decoding))


def bookkeeping_bytes(scheduler: Scheduler) -> int:
    """Bytes of the scheduler's own objects about pages on the device; 0 if off.

    Every object that the residency core reaches is counted once. Ids of blocks and
    pages are counted too, although vLLM's objects share some of them.
    """
    hisparse = getattr(scheduler.kv_cache_manager, "hisparse", None)
    if hisparse is None:
        return 0
    seen: set[int] = set()
    waiting = deque([hisparse.residency.__dict__[k] for k in _own(hisparse.residency)])
    total = 0
    while waiting:
        thing = waiting.popleft()
        if id(thing) in seen or isinstance(thing, type) or callable(thing):
            continue
        seen.add(id(thing))
        total += sys.getsizeof(thing)
        waiting.extend(gc.get_referents(thing))
    return total


def _own(residency: Any) -> list[str]:
    """Attributes that are the core's own, not ways back to the manager."""
    return [name for name, value in vars(residency).items() if not callable(value)]


def describe(scheduler: Scheduler) -> dict[str, Any]:
    """What this process is and holds, before anything is measured."""
    manager = getattr(scheduler.kv_cache_manager, "hisparse", None)
    residency = manager and manager.residency
    return {
        "version": importlib.metadata.version("vllm"),
        "is_patched": importlib.util.find_spec("vllm.v1.hisparse") is not None,
        "running": len(scheduler.running),
        "blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        "device_blocks": residency.config.num_blocks if residency else 0,
        "mixed": residency.num_leases if residency else 0,
        "bookkeeping_bytes": bookkeeping_bytes(scheduler),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


_REMEDY = "remedy: give more --requests or --tokens (16 and 34,500 do)"


def check_running(scheduler: Scheduler, variant: str, num_requests: int) -> None:
    """End this process unless all requests run: a step of fewer is another one."""
    running = len(scheduler.running)
    if running != num_requests:
        raise SystemExit(
            f"error: in {variant!r} the device holds {DEVICE_SHARE[variant]:g} times "
            f"what all requests take, and {running} of {num_requests} run\n{_REMEDY}"
        )


def main() -> None:
    """Serve rounds: `scheduler_world.py VARIANT REQUESTS TOKENS STEPS`."""
    variant, *numbers = sys.argv[1:]
    num_requests, num_tokens, num_steps = (int(number) for number in numbers)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    with tempfile.TemporaryDirectory() as folder:
        try:
            scheduler = make_scheduler(
                Path(folder), variant, num_requests, num_tokens, num_steps
            )
        except ValueError as error:
            raise SystemExit(f"error: in {variant!r}: {error}\n{_REMEDY}") from None
        for number in fill(scheduler, num_requests, num_tokens):
            print(number, file=answers, flush=True)
        check_running(scheduler, variant, num_requests)
        print(json.dumps(describe(scheduler)), file=answers, flush=True)
        for line in sys.stdin:
            steps = [step(scheduler) for _ in range(int(line))]
            check_running(scheduler, variant, num_requests)
            print(json.dumps(steps), file=answers, flush=True)


if __name__ == "__main__":
    main()
