# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Make `v1/hisparse` importable as `hisparse_core`, without vLLM and without torch.

HISPARSE_OVERLAY names the folder that holds `v1`, by default the repository's overlay.
"""

import importlib.util
import os
import sys
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]
_OVERLAY = Path(os.environ.get("HISPARSE_OVERLAY", _REPOSITORY / "vllm_overlay"))

if "hisparse_core" not in sys.modules:
    _spec = importlib.util.spec_from_loader("hisparse_core", None, is_package=True)
    assert _spec is not None
    _package = importlib.util.module_from_spec(_spec)
    _package.__path__ = [str(_OVERLAY / "v1" / "hisparse")]
    sys.modules["hisparse_core"] = _package
