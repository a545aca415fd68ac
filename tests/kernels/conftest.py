# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The kernels run in Triton's interpreter, as the package `kernels`, without vLLM."""

import os
import sys
from pathlib import Path

# Before triton is imported: the decorator decides.
os.environ["TRITON_INTERPRET"] = "1"
OVERLAY = os.environ.get(
    "HISPARSE_OVERLAY", Path(__file__).resolve().parents[2] / "vllm_overlay"
)
sys.path.insert(0, str(Path(OVERLAY) / "v1" / "hisparse"))

import pytest  # noqa: E402
import torch  # noqa: E402
from kernels import checks  # noqa: E402

from race_detector import RaceDetector  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def argument_checks():
    """Every test runs with the launchers' checks on."""
    checks.ENABLED = True
    yield
    checks.ENABLED = False


@pytest.fixture
def races():
    """Fails the test if a kernel launched in it has a race."""
    with RaceDetector() as detector:
        yield detector
    assert not detector.races, "\n".join(map(str, detector.races[:10]))
