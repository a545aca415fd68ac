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


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Toy, Toy]:
    """An empty and a filled project, made once and copied for every test."""
    folder = tmp_path_factory.mktemp("templates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HISPARSE_CACHE", str(folder / "cache"))
        empty = Toy(folder / "empty")
        return empty, empty.copied(folder / "filled").with_series()


@pytest.fixture
def toy(templates: tuple[Toy, Toy], tmp_path: Path) -> Toy:
    """A toy project with an empty series."""
    return templates[0].copied(tmp_path / "toy")


@pytest.fixture
def series_toy(templates: tuple[Toy, Toy], tmp_path: Path) -> Toy:
    """A toy project with two patches and two overlay files, and their tree."""
    return templates[1].copied(tmp_path / "toy")
