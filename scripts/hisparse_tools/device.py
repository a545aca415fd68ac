# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Finding out what this machine can run."""

from __future__ import annotations

import ctypes

from .pins import Device


def has_cuda() -> bool:
    """Return whether the CUDA driver is here and reports at least one device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def detect() -> Device:
    """Return CUDA if the machine has it, else the CPU."""
    return Device.CUDA if has_cuda() else Device.CPU
