# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Fixtures of the end-to-end tests: the patched vLLM on the CPU."""

import os

import pytest

# Before vLLM or Triton is imported. The batch-invariant mode is the process's,
# not an engine's.
os.environ["VLLM_BATCH_INVARIANT"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from engines import Engines  # noqa: E402


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Engines shared by all tests of the process."""
    pytest.importorskip("vllm", reason="needs the patched vLLM")
    return Engines(tmp_path_factory.mktemp("tiny-glm"))
