# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""From pins and series to a wheel in ``dist/``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .apply import Applied, apply_series, check_base, check_tree
from .env import ensure_env
from .fetch import get_sdist, get_wheel
from .git import Git, init_repository
from .paths import Project, scratch
from .pins import Device, Pins, read_pins
from .progress import step
from .repack import Built, repack
from .sdist import Base, import_sdist
from .series import Series, read_series


@contextmanager
def imported(pins: Pins, sdist: Path | None) -> Iterator[tuple[Git, Base, Path]]:
    """Yield a bare repository, the unpatched source in it, and a scratch folder."""
    with step(f"getting {pins.sdist.file}"):
        archive = get_sdist(pins, sdist)
    with scratch() as folder:
        git = init_repository(folder / "source.git")
        with step("importing the source"):
            base = import_sdist(git, archive)
            check_base(base, pins.base_tree, pins.sdist.file)
        yield git, base, folder


@contextmanager
def patched(
    pins: Pins, series: Series, sdist: Path | None
) -> Iterator[tuple[Applied, Path]]:
    """Yield the patched source, proven but for its tree id, and a scratch folder."""
    with imported(pins, sdist) as (git, base, folder):
        with step(f"applying {len(series.patches)} patches"):
            applied = apply_series(git, base, series, folder)
        yield applied, folder


def build(
    project: Project,
    device: Device,
    machine: str | None = None,
    sdist: Path | None = None,
    wheel: Path | None = None,
    out: Path | None = None,
) -> Built:
    """Fetch, verify, apply, prove and repack.

    Args:
        project: The checkout to build.
        device: What the wheel is to run on.
        machine: Machine name; this machine's by default.
        sdist: Source archive to use instead of fetching it.
        wheel: Published wheel to use instead of fetching it.
        out: Folder for the wheel; ``dist/`` by default.

    Raises:
        ToolError: If anything is not exactly what the project pins.
    """
    pins = read_pins(project.pins_file)
    pin = pins.wheel(device, machine)
    series = read_series(project)
    with patched(pins, series, sdist) as (applied, _):
        check_tree(applied, pins.tree)
        with step(f"getting {pin.artifact.file}"):
            published = get_wheel(pins, pin, wheel)
        with step("repacking"):
            return repack(published, pins, pin, applied, series, out or project.dist)


def cpu_python(project: Project) -> Path:
    """Interpreter of the CPU environment with the build in it; makes what is missing.

    Raises:
        ToolError: See `build` and `ensure_env`.
    """
    return ensure_env(project, build(project, Device.CPU).path)
