# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Tests inside the patched vLLM, without an engine."""

import pytest

pytest.importorskip("vllm", reason="needs the patched vLLM")
