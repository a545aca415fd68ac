# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""``upstream.toml``: every pin of the release the series stands on."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import ToolError


class Device(str, Enum):
    """What a built wheel runs on."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True)
class Artifact:
    """A published file.

    Attributes:
        project: Name of its project on the package index.
        file: File name.
        sha256: Hash of its bytes, in hex.
    """

    project: str
    file: str
    sha256: str


@dataclass(frozen=True)
class WheelPin:
    """A published wheel whose native libraries a build carries on.

    Attributes:
        artifact: The file.
        platform: Platform tag, such as ``manylinux_2_28_x86_64``.
        local: Local version label of the built wheel, without the build number.
        replaced: Files known to differ from the sdist; the sdist's version wins.
        requires_drop: Projects whose requirements are left out.
        requires_add: Requirements put in their place.
    """

    artifact: Artifact
    platform: str
    local: str
    replaced: frozenset[str]
    requires_drop: frozenset[str]
    requires_add: tuple[str, ...]


@dataclass(frozen=True)
class Pins:
    """Everything in ``upstream.toml``.

    Attributes:
        version: The upstream release.
        build: Build number of the series.
        tree: Git tree id of the patched source, overlay included.
        sdist: The upstream source.
        base_tree: Git tree id of the unpatched source.
        wheels: Wheels by key: device, a dash, machine.
    """

    version: str
    build: int
    tree: str
    sdist: Artifact
    base_tree: str
    wheels: dict[str, WheelPin]

    def wheel(self, device: Device, machine: str | None = None) -> WheelPin:
        """Return the wheel for a device.

        Args:
            device: Where the build is to run.
            machine: Machine name as of `platform.machine`; this machine's by default.

        Raises:
            ToolError: If no wheel is pinned for the pair.
        """
        key = f"{device.value}-{machine or platform.machine()}"
        try:
            return self.wheels[key]
        except KeyError:
            raise ToolError(
                f"no published {device.value} wheel is pinned for {key}",
                f"choose one of: {', '.join(sorted(self.wheels))} "
                "(--device, --machine)",
            ) from None


def load_toml(text: str) -> dict[str, Any]:
    """Parse TOML with what this Python has.

    Raises:
        ToolError: If it has nothing.
        ValueError: If the text is no TOML.
    """
    data: dict[str, Any] = _toml().loads(text)
    return data


def _toml() -> ModuleType:
    for name in ("tomllib", "tomli", "pip._vendor.tomli"):
        try:
            module = __import__(name, fromlist=["loads"])
        except ImportError:
            continue
        return module
    raise ToolError(
        "this Python 3.10 has no TOML reader",
        "use Python 3.11 or later, or install pip or tomli for this one",
    )


def _artifact(table: dict[str, Any]) -> Artifact:
    sha256 = table["sha256"]
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ValueError(f"sha256 of {table['file']} is not 64 hex digits")
    return Artifact(table["project"], table["file"], sha256)


def _wheel(table: dict[str, Any]) -> WheelPin:
    return WheelPin(
        artifact=_artifact(table),
        platform=table["platform"],
        local=table["local"],
        replaced=frozenset(table.get("replaced", ())),
        requires_drop=frozenset(table.get("requires_drop", ())),
        requires_add=tuple(table.get("requires_add", ())),
    )


def parse_pins(text: str, name: str = "upstream.toml") -> Pins:
    """Parse the text of ``upstream.toml``.

    Raises:
        ToolError: If it is not TOML, or a field is missing or malformed.
    """
    try:
        data = load_toml(text)
        return Pins(
            version=data["upstream"]["version"],
            build=int(data["series"]["build"]),
            tree=data["series"]["tree"],
            sdist=_artifact(data["sdist"]),
            base_tree=data["sdist"]["tree"],
            wheels={key: _wheel(table) for key, table in data["wheel"].items()},
        )
    except (KeyError, ValueError, TypeError) as error:
        detail = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ToolError(
            f"{name} cannot be used: {detail}",
            "restore the file from version control",
        ) from error


def read_pins(path: Path) -> Pins:
    """Read ``upstream.toml``.

    Raises:
        ToolError: If it cannot be read or used.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ToolError(
            f"{path} cannot be read: {error.strerror}",
            "run this inside a complete checkout of the project",
        ) from error
    return parse_pins(text, path.name)


def with_tree(text: str, tree: str) -> str:
    """Return the text of ``upstream.toml`` with another tree id in ``[series]``.

    Everything else, comments included, stays as it is.
    """
    head, mark, tail = text.partition("[series]\n")
    new, count = re.subn(r'(?m)^tree = "[^"]*"$', f'tree = "{tree}"', tail, count=1)
    if not mark or not count:
        raise ToolError(
            "upstream.toml has no tree line in its [series] table",
            "restore the file from version control",
        )
    return head + mark + new
