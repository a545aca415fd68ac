# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The kernels run as the package `kernels`, without vLLM.

They run in Triton's interpreter, or compiled on the device that HISPARSE_TEST_DEVICE
names ("cpu": the interpreter, over copies, as `crossing.py` makes them for a device).
"""

import os
import sys
from pathlib import Path

from crossing import DEVICE, ON_GPU, cross_all

# Before triton is imported: the decorator decides.
if ON_GPU:
    os.environ.pop("TRITON_INTERPRET", None)
else:
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
if DEVICE is not None:
    cross_all(DEVICE)
# It watches the interpreter.
collect_ignore = ["test_race_detector.py"] if ON_GPU else []


@pytest.fixture(autouse=True)
def argument_checks():
    """Every test runs with the launchers' checks on."""
    checks.ENABLED = True
    yield
    checks.ENABLED = False


@pytest.fixture
def races():
    """Fails the test if a kernel launched in it has a race the interpreter can show."""
    if ON_GPU:
        yield None
        return
    with RaceDetector() as detector:
        yield detector
    assert not detector.races, "\n".join(map(str, detector.races[:10]))
