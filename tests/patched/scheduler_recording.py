# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A seeded run of vLLM's scheduler without a model, step by step as text (R9).

    python scheduler_recording.py MODEL_FOLDER > scheduler_recording.txt

wrote the recording from the unpatched release. The run has prefix hits, chunked
prefill, waiting, preemption, finished and aborted requests.
"""

import random
import sys

import vllm.config.vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

# No kernel runs here; the unpatched release has no Triton on the CPU.
vllm.config.vllm.HAS_TRITON = True

BLOCK_SIZE = 16
NUM_BLOCKS = 34
STEPS = 300


def make_scheduler(model_folder: str) -> Scheduler:
    """A scheduler with one MLA group and little memory."""
    import torch

    model_config = ModelConfig(model=model_folder, max_model_len=512)
    vllm_config = VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=512,
            is_encoder_decoder=False,
            watermark=0.0,
        ),
        device_config=DeviceConfig("cpu"),
    )
    # The CPU platform of the release has other ideas for MLA models.
    vllm_config.cache_config.block_size = BLOCK_SIZE
    vllm_config.cache_config.enable_prefix_caching = True
    vllm_config.scheduler_config.enable_chunked_prefill = True
    vllm_config.scheduler_config.max_num_batched_tokens = 64
    vllm_config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = MLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=576, dtype=torch.float32
    )
    return Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(vllm_config),
    )


def record(model_folder: str) -> list[str]:
    """Run the traffic; one line for each step's output."""
    generator = random.Random(0)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    scheduler = make_scheduler(model_folder)
    lines = []
    for step in range(STEPS):
        if step % 4 == 0 and step < 200:
            shared = [generator.randrange(3)] * (16 * generator.randrange(8))
            own = [generator.randrange(256) for _ in range(generator.randrange(1, 90))]
            params = SamplingParams(
                max_tokens=generator.randrange(1, 60), ignore_eos=True
            )
            scheduler.add_request(
                Request(
                    request_id=f"r{step}",
                    prompt_token_ids=shared + own,
                    sampling_params=params,
                    pooling_params=None,
                    block_hasher=hasher,
                )
            )
        if step % 41 == 40 and scheduler.running:
            victim = generator.choice(scheduler.running).request_id
            scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        lines.append(_step(scheduler, step))
    lines.append(f"free {scheduler.kv_cache_manager.block_pool.get_num_free_blocks()}")
    return lines


def _step(scheduler: Scheduler, step: int) -> str:
    output = scheduler.schedule()
    new = [
        (r.req_id, r.block_ids, r.num_computed_tokens)
        for r in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    ids = list(output.num_scheduled_tokens)
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request: i for i, request in enumerate(ids)},
            sampled_token_ids=[_sampled(scheduler, request, step) for request in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        ),
    )
    return repr(
        (
            step,
            output.num_scheduled_tokens,
            new,
            (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens),
            sorted(output.finished_req_ids),
            sorted(output.preempted_req_ids or ()),
            output.kv_connector_metadata,
            round(scheduler.kv_cache_manager.usage, 6),
        )
    )


def _sampled(scheduler: Scheduler, request_id: str, step: int) -> list[int]:
    """A token when the request's tokens are all computed, nothing in a chunk."""
    request = scheduler.requests[request_id]
    is_done = request.num_computed_tokens >= request.num_tokens
    return [(step * 7 + len(request_id)) % 256] if is_done else []


if __name__ == "__main__":
    print("\n".join(record(sys.argv[1])))
