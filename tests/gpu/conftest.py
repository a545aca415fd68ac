# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What only a GPU can show: graphs, streams, memory of the host read in place.

`nox -s gpu` names the device in HISPARSE_TEST_DEVICE and needs no vLLM: the overlay of
this checkout then stands in for the package. Without that, the tests run in the patched
vLLM on the CPU: Triton's interpreter, launches recorded and run again instead of a
graph, work put off until it is joined instead of a stream. That proves the tests, and
what does not depend on a GPU.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

PROJECT = Path(__file__).resolve().parents[2]
DEVICE = os.environ.get("HISPARSE_TEST_DEVICE", "cpu")

# Before triton is imported: the decorator decides.
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
else:
    os.environ.pop("TRITON_INTERPRET", None)

import pytest  # noqa: E402


def _bring_the_overlay() -> None:
    """Make this checkout's `v1/hisparse` the one of vLLM, which need not be there."""
    overlay = PROJECT / "vllm_overlay"
    if find_spec("vllm") is None:
        package = ModuleType("vllm")
        package.__path__ = [str(overlay)]
        sys.modules["vllm"] = package
    else:
        import vllm.v1

        vllm.v1.__path__.insert(0, str(overlay / "v1"))


if "HISPARSE_TEST_DEVICE" in os.environ:
    _bring_the_overlay()
else:
    pytest.importorskip("vllm", reason="needs the patched vLLM")
# The oracle of the LRU, and a rank without an engine.
for folder in ("kernels", "patched"):
    sys.path.append(str(PROJECT / "tests" / folder))

import torch  # noqa: E402

import under_test  # noqa: E402


@pytest.fixture
def device() -> torch.device:
    """The device under test."""
    return under_test.DEVICE
