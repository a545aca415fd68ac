# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Tools that fetch, patch, prove and repack the pinned vLLM release.

Standard library only: everything here runs on a bare ``python3`` (3.10 or later)
with ``git``.
"""
