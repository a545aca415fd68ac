# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The device under test, and what a test may want of it."""

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("HISPARSE_TEST_DEVICE", "cpu"))
ON_GPU = DEVICE.type == "cuda"

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")


def needs_memory(num_bytes: int) -> None:
    """Skip where the device has less free memory than that."""
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < num_bytes:
        pytest.skip(f"needs {num_bytes / 1e9:.0f} GB of free device memory")
