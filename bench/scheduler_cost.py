# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""CPU time of the scheduler per decode step, with HiSparse and without.

    python bench/scheduler_cost.py [--requests 64] [--tokens 138000] [--steps 200]

vLLM's own scheduler, cache manager and connector run without a model, at the block
counts of GLM-5.3 on one H200: one step is `schedule` and `update_from_output` for
requests that all decode. Both variants run in one process, one after the other; the
pools are large enough that nothing changes hands in the measured steps but the pages
that requests fill.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
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
from vllm.v1.hisparse.glue import config as hisparse_config
from vllm.v1.hisparse.glue import planning  # noqa: F401
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tiny_glm.sizes import TinyGlmSizes, model_config

BLOCK_SIZE = 64
NUM_LATENTS = 79
LEADERS = [0, 1, 2, *range(6, 78, 4), 78]
GIB = 1 << 30


def specs() -> dict[str, MLAAttentionSpec]:
    """Cache specs of GLM-5.3 with its MTP layer, fp8_ds_mla rows."""
    found: dict[str, MLAAttentionSpec] = {}
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


def make_scheduler(folder: Path, args: argparse.Namespace, on: bool) -> Scheduler:
    """A scheduler whose pools hold all requests."""
    tokens = args.tokens + args.steps + 1_000
    config = {**model_config(TinyGlmSizes()), "max_position_embeddings": 1 << 20}
    config["index_topk"] = 2048
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    pages = args.requests * (tokens // BLOCK_SIZE + 2)
    page_bytes = BLOCK_SIZE * (NUM_LATENTS * 656 + len(LEADERS) * 132)
    extra: dict[str, Any] = {}
    if on:
        hisparse_config.available_ram_bytes = lambda: 1 << 60
        extra["kv_transfer_config"] = {
            "kv_connector": "HiSparseConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "host_pool_gib": 2 * pages * page_bytes / GIB
            },
        }
    vllm_config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=tokens,
        max_num_batched_tokens=args.tokens + 1_000,
        max_num_seqs=args.requests,
        block_size=BLOCK_SIZE,
        kv_cache_dtype="fp8_ds_mla",
        **extra,
    ).create_engine_config()
    vllm_config.cache_config.kv_cache_layout = "LBNHC"
    memory = int(1.5 * pages * page_bytes)
    (worker_config,) = get_kv_cache_configs(vllm_config, [specs()], [memory])
    vllm_config.cache_config.num_gpu_blocks = worker_config.num_blocks
    return Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=generate_scheduler_kv_cache_config([worker_config]),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(vllm_config),
    )


def step(scheduler: Scheduler) -> float:
    """One step; returns its CPU seconds without the stand-in for the worker."""
    start = time.process_time()
    output = scheduler.schedule()
    scheduled = time.process_time()
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
    _acknowledge(output, result)
    resumed = time.process_time()
    scheduler.update_from_output(output, result)
    return time.process_time() - resumed + scheduled - start


def _is_computed(request: Request) -> bool:
    return request.num_computed_tokens >= request.num_tokens


def _acknowledge(output, result: ModelRunnerOutput) -> None:
    """Complete this step's write-backs, as a worker would some steps later."""
    if (metadata := output.kv_connector_metadata) is None:
        return
    from vllm.v1.hisparse.glue.connector import HiSparseAcks
    from vllm.v1.outputs import KVConnectorOutput

    done = {copy.transfer_id: {0} for copy in metadata.update.write_backs}
    result.kv_connector_output = KVConnectorOutput(
        kv_connector_worker_meta=HiSparseAcks(done)
    )


def measure(args: argparse.Namespace, on: bool) -> None:
    """Prefill all requests, then time decode steps; print one row."""
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(Path(folder), args, on)
        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(args.requests):
            params = SamplingParams(max_tokens=args.steps + 500, ignore_eos=True)
            tokens = [number] * args.tokens
            scheduler.add_request(
                Request(f"r{number}", tokens, params, None, block_hasher=hasher)
            )
        while any(r.num_output_tokens < 2 for r in scheduler.requests.values()):
            step(scheduler)
        times = [step(scheduler) for _ in range(args.steps)]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert len(scheduler.running) == args.requests
    name = "HiSparse" if on else "off"
    times.sort()
    print(
        f"| {name} | {args.requests} | {args.tokens:,} | "
        f"{1e3 * statistics.median(times):.2f} | {1e3 * statistics.mean(times):.2f} | "
        f"{grown / 1024:.0f} |",
        flush=True,
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=138_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--variant", choices=["off", "on", "both"], default="both")
    args = parser.parse_args()
    print("| variant | requests | tokens | median ms | mean ms | resident MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for variant in ("off", "on"):
        if args.variant in (variant, "both"):
            measure(args, variant == "on")


if __name__ == "__main__":
    main()
