# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Makes the overlay's HiSparse importable as `hisparse_core`, without vLLM."""

import sys
from pathlib import Path
from types import ModuleType

PROJECT = Path(__file__).resolve().parents[1]

if "hisparse_core" not in sys.modules:
    _package = ModuleType("hisparse_core")
    _package.__path__ = [str(PROJECT / "vllm_overlay" / "v1" / "hisparse")]
    sys.modules["hisparse_core"] = _package
