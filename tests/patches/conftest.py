# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Fixtures: a toy project, and a cache and configuration that touch nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy import Toy


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test an empty cache."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("HISPARSE_CACHE", str(cache))
    return cache


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """A toy project with an empty series."""
    return Toy(tmp_path / "toy")


@pytest.fixture
def series_toy(toy: Toy) -> Toy:
    """A toy project with two patches and two overlay files."""
    return toy.with_series()
