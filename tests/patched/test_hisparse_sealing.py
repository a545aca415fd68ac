# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""When the scheduler's side takes a page for sealed (R6)."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs the patched vLLM")

from vllm.v1.hisparse.glue.connector import HiSparseConnector  # noqa: E402
from vllm.v1.hisparse.glue.manager import HiSparseManager  # noqa: E402


@pytest.mark.parametrize("settled, pages", [(31, 1), (32, 2), (33, 2)])
def test_what_a_drafter_of_several_modules_writes_again_is_not_sealed(
    settled: int, pages: int
) -> None:
    """It runs over the last computed tokens once more; vLLM says over how many."""
    manager = HiSparseManager.__new__(HiSparseManager)
    sealed: dict[str, int] = {}
    manager.residency = SimpleNamespace(seal=sealed.__setitem__)
    manager.block_size = 16
    coordinator = SimpleNamespace(
        single_type_managers=(manager,), num_reprefillable_tokens=3
    )
    connector = HiSparseConnector.__new__(HiSparseConnector)
    connector.bind_kv_cache_manager(SimpleNamespace(coordinator=coordinator))
    manager.remove_skipped_blocks("request", settled + 3)
    assert sealed == {"request": pages}
