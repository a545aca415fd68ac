# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The pure-Python part of HiSparse, imported from the overlay without vLLM."""

import importlib.util
import sys
from pathlib import Path

import os

_FOLDER = (
    Path(os.environ.get("HISPARSE_OVERLAY", Path(__file__).parents[2] / "vllm_overlay"))
    / "v1"
    / "hisparse"
)


def _package() -> None:
    spec = importlib.util.spec_from_loader(
        "hisparse_core", loader=None, is_package=True
    )
    module = importlib.util.module_from_spec(spec)
    module.__path__ = [str(_FOLDER)]
    sys.modules["hisparse_core"] = module


_package()

from hisparse_core.integrity import check_integrity  # noqa: E402
from hisparse_core.messages import INDEXER_ONLY, HotLease  # noqa: E402
from hisparse_core.residency import (  # noqa: E402
    PageState,
    Residency,
    ResidencyConfig,
)

__all__ = [
    "INDEXER_ONLY",
    "HotLease",
    "PageState",
    "Residency",
    "ResidencyConfig",
    "check_integrity",
]
