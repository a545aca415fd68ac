# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The ``.dist-info`` texts of a built wheel."""

from __future__ import annotations

import re

from .errors import ToolError
from .pins import Pins, WheelPin

_REQUIREMENTS = ("Requires-Dist", "Provides-Extra")


def built_version(pins: Pins, pin: WheelPin) -> str:
    """Return the version of a built wheel, such as ``0.29.0+hisparse.1``."""
    return f"{pins.version}+{pin.local}.{pins.build}"


def wheel_tag(pin: WheelPin) -> str:
    """Return the tag that the published wheel's file name ends in."""
    stem = pin.artifact.file.removesuffix(".whl")
    return "-".join(stem.split("-")[-3:])


def wheel_name(pins: Pins, pin: WheelPin) -> str:
    """Return the file name of a built wheel."""
    return f"vllm-{built_version(pins, pin)}-{wheel_tag(pin)}.whl"


def _split(text: str) -> tuple[list[str], str]:
    head, _, body = text.replace("\r\n", "\n").partition("\n\n")
    return head.split("\n"), body


def _project(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    name = match[0] if match else requirement
    return re.sub(r"[-_.]+", "-", name).lower()


def build_metadata(
    pkg_info: str, wheel_metadata: str, pins: Pins, pin: WheelPin
) -> str:
    """Return the METADATA of a built wheel.

    Description, authors and links are upstream's own (the sdist's ``PKG-INFO``);
    requirements and extras are those of the published wheel, which know the device.

    Args:
        pkg_info: Text of the sdist's ``PKG-INFO``.
        wheel_metadata: Text of the published wheel's ``METADATA``.
        pins: The pins.
        pin: The published wheel.
    """
    head, body = _split(pkg_info)
    ours = [line for line in head if line.split(":")[0] not in _REQUIREMENTS]
    versions = [i for i, line in enumerate(ours) if line.startswith("Version: ")]
    if len(versions) != 1 or "Name: vllm" not in ours:
        raise ToolError(
            "the source archive's PKG-INFO is not that of a vllm release",
            "use the archive pinned in upstream.toml",
        )
    ours[versions[0]] = f"Version: {built_version(pins, pin)}"
    needs = [f"Requires-Dist: {requirement}" for requirement in pin.requires_add]
    for line in _split(wheel_metadata)[0]:
        key, _, value = line.partition(": ")
        if key not in _REQUIREMENTS:
            continue
        if key == "Requires-Dist" and _project(value) in pin.requires_drop:
            continue
        needs.append(line)
    return "\n".join([*ours, *needs]) + "\n\n" + body


def build_wheel_file(text: str, pin: WheelPin) -> str:
    """Return the WHEEL file of a built wheel, its tag that of the file name."""
    lines = [line for line in text.splitlines() if line and not line.startswith("Tag:")]
    kept = [line for line in lines if not line.startswith("Generator:")]
    kept.insert(1, "Generator: hybrid-hisparse")
    return "\n".join([*kept, f"Tag: {wheel_tag(pin)}"]) + "\n"


def build_version_file(text: str, pins: Pins, pin: WheelPin) -> str:
    """Return ``vllm/_version.py`` with the built wheel's version.

    Raises:
        ToolError: If the upstream text does not have the two expected lines.
    """
    version = built_version(pins, pin)
    numbers = tuple(int(part) for part in pins.version.split("."))
    parts = (*numbers, version.partition("+")[2])
    text, one = re.subn(
        r"(?m)^__version__ = version = '.*'$",
        f"__version__ = version = '{version}'",
        text,
    )
    text, two = re.subn(
        r"(?m)^__version_tuple__ = version_tuple = \(.*\)$",
        f"__version_tuple__ = version_tuple = {parts!r}",
        text,
    )
    if (one, two) != (1, 1):
        raise ToolError(
            "vllm/_version.py of the source archive does not have the expected lines",
            "use the archive pinned in upstream.toml",
        )
    return text
