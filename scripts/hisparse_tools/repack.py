# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The published wheel with the patched source's files in it."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .apply import Applied
from .errors import ToolError
from .metadata import (
    build_metadata,
    build_version_file,
    build_wheel_file,
    built_version,
    wheel_name,
)
from .paths import scratch
from .pins import Pins, WheelPin
from .progress import Bar
from .series import Series
from .zipwriter import ZipWriter

_VERSION_FILE = "vllm/_version.py"


@dataclass(frozen=True)
class Built:
    """A finished wheel."""

    path: Path
    sha256: str
    version: str
    changed: int


@dataclass(frozen=True)
class _Recipe:
    """What goes into the wheel, by member name."""

    copied: dict[str, zipfile.ZipInfo]
    written: dict[str, bytes]
    records: dict[str, tuple[str, str]]


def _blobs(applied: Applied, commit: str) -> dict[str, str]:
    listing = applied.git.raw("ls-tree", "-r", "-z", commit, "--", "vllm")
    blobs = {}
    for line in listing.decode("utf-8").split("\0")[:-1]:
        head, path = line.split("\t", 1)
        blobs[path] = head.split(" ")[2]
    return blobs


def source_changes(
    applied: Applied, pin: WheelPin, members: dict[str, int]
) -> dict[str, bytes | None]:
    """Return what must change in the wheel's ``vllm/``: content, or None to drop.

    Args:
        applied: The patched source.
        pin: The wheel's pin.
        members: CRC-32 by name of the wheel's members.

    Raises:
        ToolError: If the wheel was not built from the unpatched source, or holds a
            file of its own where the overlay lays one.
    """
    old = _blobs(applied, applied.base.commit)
    new = _blobs(applied, applied.head)
    changes: dict[str, bytes | None] = {}
    for path, blob in new.items():
        if path in old:
            differs = path in members and members[path] != applied.base.crc[path]
            if (differs or path not in members) and path not in pin.replaced:
                how = "differs from" if differs else "lacks"
                raise ToolError(
                    f"{pin.artifact.file} {how} the source archive's {path}",
                    "pin a wheel built from that source; list a difference that is "
                    "understood under 'replaced' in upstream.toml",
                )
            wanted = differs or path not in members or blob != old[path]
        elif path in members:
            raise ToolError(
                f"overlay file {path} exists in {pin.artifact.file}",
                "give the overlay file another name",
            )
        else:
            wanted = True
        if wanted:
            changes[path] = applied.git.raw("cat-file", "blob", blob)
    changes.update({path: None for path in old if path not in new})
    return changes


def _identity(pins: Pins, pin: WheelPin, applied: Applied, series: Series) -> bytes:
    """Return ``hisparse.json``, by which an installed build says what it contains."""
    patches = [
        {
            "id": patch.message.value("Patch"),
            "file": patch.name,
            "subject": patch.message.subject,
            "sha256": hashlib.sha256(patch.content).hexdigest(),
        }
        for patch in series.patches
    ]
    identity = {
        "format": 1,
        "version": built_version(pins, pin),
        "sdist": {"file": pins.sdist.file, "sha256": pins.sdist.sha256},
        "wheel": {"file": pin.artifact.file, "sha256": pin.artifact.sha256},
        "tree": applied.tree,
        "patches": patches,
        "overlay": sorted(series.overlay),
    }
    return (json.dumps(identity, indent=1, sort_keys=True) + "\n").encode()


def _record(content: bytes) -> tuple[str, str]:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return f"sha256={digest.decode().rstrip('=')}", str(len(content))


def _plan(
    archive: zipfile.ZipFile,
    pins: Pins,
    pin: WheelPin,
    applied: Applied,
    series: Series,
) -> _Recipe:
    infos = {info.filename: info for info in archive.infolist() if not info.is_dir()}
    folders = {name.split("/")[0] for name in infos if ".dist-info/" in name}
    if len(folders) != 1:
        raise ToolError(
            f"{pin.artifact.file} has {len(folders)} .dist-info folders, not one",
            "use the wheel pinned in upstream.toml",
        )
    old_info = folders.pop()
    new_info = f"vllm-{built_version(pins, pin)}.dist-info"

    def show(path: str) -> str:
        return applied.git.raw("show", f"{applied.head}:{path}").decode("utf-8")

    members = {name: info.CRC for name, info in infos.items()}
    changes = source_changes(applied, pin, members)
    version_text = build_version_file(show(_VERSION_FILE), pins, pin)
    changes[_VERSION_FILE] = version_text.encode()
    metadata = archive.read(f"{old_info}/METADATA").decode("utf-8")
    wheel_text = archive.read(f"{old_info}/WHEEL").decode("utf-8")
    texts = {
        "METADATA": build_metadata(show("PKG-INFO"), metadata, pins, pin).encode(),
        "WHEEL": build_wheel_file(wheel_text, pin).encode(),
        "hisparse.json": _identity(pins, pin, applied, series),
    }
    written = {name: data for name, data in changes.items() if data is not None}
    written.update({f"{new_info}/{name}": data for name, data in texts.items()})
    skipped = {f"{old_info}/{name}" for name in (*texts, "RECORD")} | set(changes)
    copied = {
        name.replace(old_info, new_info, 1) if name.startswith(old_info) else name: info
        for name, info in infos.items()
        if name not in skipped
    }
    rows = csv.reader(io.StringIO(archive.read(f"{old_info}/RECORD").decode("utf-8")))
    known = {row[0]: (row[1], row[2]) for row in rows if row}
    records = {name: known[info.filename] for name, info in copied.items()}
    records.update({name: _record(data) for name, data in written.items()})
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    for name in sorted(records):
        writer.writerow([name, *records[name]])
    writer.writerow([f"{new_info}/RECORD", "", ""])
    written[f"{new_info}/RECORD"] = table.getvalue().encode()
    return _Recipe(copied, written, records)


def _order(name: str) -> tuple[bool, bool, str]:
    # .dist-info last, RECORD at the very end, as wheels are usually laid out
    return ".dist-info/" in name, name.endswith("/RECORD"), name


def repack(
    wheel: Path,
    pins: Pins,
    pin: WheelPin,
    applied: Applied,
    series: Series,
    out: Path,
) -> Built:
    """Write the built wheel; the same inputs give the same bytes everywhere.

    Args:
        wheel: The published wheel, already verified.
        pins: The pins.
        pin: Its pin.
        applied: The patched source.
        series: The series that was applied.
        out: Folder for the result.

    Raises:
        ToolError: If the published wheel does not fit the source.
    """
    out.mkdir(parents=True, exist_ok=True)
    final = out / wheel_name(pins, pin)
    with (
        scratch(out / ".staging") as staging,
        open(wheel, "rb") as source,
        zipfile.ZipFile(source) as archive,
    ):
        recipe = _plan(archive, pins, pin, applied, series)
        temporary = staging / final.name
        total = sum(info.compress_size for info in recipe.copied.values())
        with open(temporary, "wb") as sink, Bar("repacking", total) as bar:
            writer = ZipWriter(sink, bar.advance)
            for name in sorted([*recipe.copied, *recipe.written], key=_order):
                if name in recipe.written:
                    writer.add(name, recipe.written[name])
                else:
                    writer.copy(name, source, recipe.copied[name])
            writer.close()
        temporary.chmod(0o644)
        os.replace(temporary, final)
    changed = sum(1 for name in recipe.written if name.startswith("vllm/"))
    return Built(final, writer.sha256, built_version(pins, pin), changed)
