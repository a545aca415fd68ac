# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A scheduler with HiSparse whose worker computes nothing: its copies end at once."""

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.hisparse.glue.connector import HiSparseAcks
from vllm.v1.hisparse.integrity import check_integrity
from vllm.v1.hisparse.messages import PageCopy
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from hisparse_configs import dsa_specs, make_config, transfer

PAGE = 16
PROMPT = [4 + (7 * i) % 250 for i in range(5 * PAGE + 3)]


class Server:
    """A scheduler with HiSparse, and a worker that copies and computes nothing."""

    def __init__(self, model: str) -> None:
        config = make_config(model, kv=transfer(), block_size=PAGE)
        specs = dsa_specs(6, [0, 3, 5], PAGE)
        (worker,) = get_kv_cache_configs(config, [specs], [8 << 20])
        config.cache_config.num_gpu_blocks = worker.num_blocks
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=generate_scheduler_kv_cache_config([worker]),
            block_size=PAGE,
            hash_block_size=PAGE,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
        )
        # The model has no encoder; its scheduler gets room for what one would give.
        self.scheduler.max_num_encoder_input_tokens = 1_000
        self.scheduler.encoder_cache_manager = EncoderCacheManager(1_000)
        self.residency = self.scheduler.kv_cache_manager.hisparse.residency
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(PAGE, sha256)
        self._count = self._hits = 0
        self._begun: list[PageCopy] = []

    def add(self, tokens: list[int], **key: Any) -> str:
        """Submit a request; returns its name."""
        self._count += 1
        request = Request(
            f"r{self._count}",
            list(tokens),
            SamplingParams(max_tokens=2, ignore_eos=True),
            None,
            block_hasher=self._hasher,
            **key,
        )
        self.scheduler.add_request(request)
        return request.request_id

    def serve(self, tokens: list[int], **key: Any) -> int:
        """Run a request, and let its pages go to the host; returns its hits."""
        self.add(tokens, **key)
        while self.scheduler.requests or self.residency.num_pending:
            self.step()
        self.residency._blocks.give_back(self.residency._take(self.residency.num_free))
        assert not self.residency._pages, "a page is still on the device"
        check_integrity(self.residency)
        return self._hits

    def step(self, ends: bool = True) -> None:
        """Schedule, and let all copies that are begun end, or none."""
        self.end(self.begin(), ends)

    def begin(self) -> SchedulerOutput:
        """Schedule a step."""
        output = self.scheduler.schedule()
        for new in output.scheduled_new_reqs:
            self._hits = new.num_computed_tokens
        update = output.kv_connector_metadata.update
        self._begun += update.write_backs + update.restores
        return output

    def end(self, output: SchedulerOutput, ends: bool = True) -> None:
        """Let a step have run: who has computed all there is gets a token."""
        copies, self._begun = (self._begun, []) if ends else ([], self._begun)
        acks = HiSparseAcks({copy.transfer_id: {0} for copy in copies})
        ids = [name for name in output.num_scheduled_tokens]
        requests = [self.scheduler.requests.get(name) for name in ids]
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[
                [7] if r is not None and r.num_computed_tokens >= r.num_tokens else []
                for r in requests
            ],
            kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=acks),
        )
        self.scheduler.update_from_output(output, result)
