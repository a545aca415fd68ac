# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Pages on the host are found under the key that they were sealed under, and no other.

The scheduler runs without a model, so adapters and images need not exist.
"""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the patched vLLM")

from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.multimodal.inputs import (  # noqa: E402
    MultiModalFeatureSpec,
    PlaceholderRange,
)

from bare_server import PAGE, PROMPT, Server  # noqa: E402


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
