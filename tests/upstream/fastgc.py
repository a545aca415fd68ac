# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A pytest plugin that makes collections after each test cheap.

Upstream's conftest unfreezes and collects garbage after every test, about half a
second with everything imported. What exists after test collection is frozen here, so
that those collections only scan what the tests made.
"""

import gc


def pytest_collection_finish(session: object) -> None:
    """Freeze what exists, and keep it frozen."""
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # type: ignore[assignment]
