# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The pure-Python part of HiSparse, imported from the overlay without vLLM."""

# conftest.py makes the overlay's folder importable as `hisparse_core`.
from hisparse_core.frames import ResidencyConfig
from hisparse_core.integrity import check_integrity
from hisparse_core.messages import INDEXER_ONLY, HotLease, PageCopy
from hisparse_core.pages import Direction, PageState, Place, Start
from hisparse_core.residency import Residency

__all__ = [
    "INDEXER_ONLY",
    "Direction",
    "HotLease",
    "PageCopy",
    "PageState",
    "Place",
    "Residency",
    "ResidencyConfig",
    "Start",
    "check_integrity",
]
