# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Libraries with kernels, each where it is there and made for this GPU."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch

from hisparse_tools.library_checks import NOT_THIS_GPU
from under_test import DEVICE, ON_GPU

# What the names of tests say that ran.
BY = ["library" if ON_GPU else "stand-in"]


def library(name: str) -> Any:
    """A module with kernels; skips where that module is not installed.

    Raises:
        Exception: It is there and cannot be imported, whatever the reason.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # A module that the library itself needs is not the library.
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise
        pytest.skip(f"{name} is not installed")


def needs_capability(name: str, majors: Sequence[int]) -> None:
    """Skip on a GPU that a library has no kernels for."""
    if torch.cuda.get_device_capability(DEVICE)[0] not in majors:
        wanted = " or ".join(f"{major}.x" for major in majors)
        pytest.skip(f"{NOT_THIS_GPU}: {name} needs compute capability {wanted}")


def kernels_fixture(
    stand_in: Any,
    name: str,
    majors: Sequence[int],
    lacks: Callable[[Any], str | None] = lambda module: None,
) -> Any:
    """A fixture that gives a library's module, or its stand-in where no GPU is.

    Args:
        stand_in: Has the functions that tests call.
        name: Of the module.
        majors: Compute capabilities that it has kernels for.
        lacks: Why a module that can be imported has no kernels; None: it has them.
    """

    @pytest.fixture(params=BY)
    def kernels() -> Any:
        if not ON_GPU:
            return stand_in
        needs_capability(name, majors)
        module = library(name)
        reason = lacks(module)
        if reason is not None:
            pytest.skip(f"{name}: {reason}")
        return module

    return kernels
