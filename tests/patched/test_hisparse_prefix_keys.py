# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Pages on the host are found under the key that they were sealed under, and no other.

The scheduler runs without a model, so adapters and images need not exist.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the patched vLLM")

from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.multimodal.inputs import (  # noqa: E402
    MultiModalFeatureSpec,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.hisparse.glue.connector import HiSparseAcks  # noqa: E402
from vllm.v1.hisparse.integrity import check_integrity  # noqa: E402
from vllm.v1.hisparse.messages import PageCopy  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from hisparse_configs import dsa_specs, make_config, transfer, write_model  # noqa: E402

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

    def add(self, tokens: list[int], **key: Any) -> None:
        """Submit a request."""
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
        output = self.scheduler.schedule()
        for new in output.scheduled_new_reqs:
            self._hits = new.num_computed_tokens
        ids = list(output.num_scheduled_tokens)
        update = output.kv_connector_metadata.update
        self._begun += update.write_backs + update.restores
        copies, self._begun = (self._begun, []) if ends else ([], self._begun)
        acks = HiSparseAcks({copy.transfer_id: {0} for copy in copies})
        requests = [self.scheduler.requests[name] for name in ids]
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[
                [7] if r.num_computed_tokens >= r.num_tokens else [] for r in requests
            ],
            kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=acks),
        )
        self.scheduler.update_from_output(output, result)


def adapter(number: int) -> LoRARequest:
    return LoRARequest(f"adapter {number}", number, f"/adapters/{number}")


def image(name: str, offset: int, length: int = 20) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=name,
        mm_position=PlaceholderRange(offset=offset, length=length),
        mm_hash=name,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("prefix-keys")
    return write_model(folder)


@pytest.fixture
def server(model: str) -> Iterator[Server]:
    server = Server(model)
    yield server
    server.scheduler.shutdown()


KEYS: dict[str, list[dict[str, Any]]] = {
    "salt": [{}, {"cache_salt": "a"}, {"cache_salt": "b"}],
    "adapter": [{}, {"lora_request": adapter(1)}, {"lora_request": adapter(2)}],
    "image": [{}, {"mm_features": [image("x", 3)]}, {"mm_features": [image("y", 3)]}],
    "place of an image": [
        {"mm_features": [image("x", 3)]},
        {"mm_features": [image("x", 4)]},
    ],
    "all": [
        {"cache_salt": s, "lora_request": adapter(n), "mm_features": [image(i, 3)]}
        for s, n, i in (("a", 1, "x"), ("b", 1, "x"), ("a", 2, "x"), ("a", 1, "y"))
    ],
}


@pytest.mark.parametrize("name", KEYS)
def test_pages_on_the_host_are_found_under_their_own_key_only(
    server: Server, name: str
) -> None:
    keys = KEYS[name]
    assert [server.serve(PROMPT, **key) for key in keys] == [0] * len(keys)
    assert server.residency.num_host_hits == 0
    assert [server.serve(PROMPT, **key) for key in keys] == [5 * PAGE] * len(keys)
    assert server.residency.num_host_hits == 5 * len(keys)
    assert server.residency.num_device_hits == 0


def test_pages_before_an_image_are_shared_and_those_behind_it_are_not(
    server: Server,
) -> None:
    """The image begins in the third page and ends in the fourth."""
    features = [[image(name, 2 * PAGE + 5)] for name in "xy"]
    found = [server.serve(PROMPT, mm_features=list(f)) for f in features]
    assert found == [0, 2 * PAGE]
    assert server.serve(PROMPT) == 2 * PAGE
    again = [server.serve(PROMPT, mm_features=list(f)) for f in features]
    assert again == [5 * PAGE] * 2


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
