# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A minimal zip writer whose output depends on its input only.

Members are written in the order given, with one fixed time, and either stored or with
compressed bytes taken from another archive, so that no version of zlib or zipfile can
change a byte.
"""

from __future__ import annotations

import hashlib
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import BinaryIO

_VERSION = 20
_UNIX = 3 << 8
_UTF8 = 0x800
_DATE = 0x0021  # 1 January 1980, the earliest a zip file can say
_LIMIT = 0xFFFFFFFF
_CHUNK_BYTES = 1 << 20


class ZipWriter:
    """Writes one archive to a binary file."""

    def __init__(self, sink: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        """Start an archive.

        Args:
            sink: An empty file, open for writing.
            on_bytes: Told about every amount of bytes written.
        """
        self._sink = sink
        self._on_bytes = on_bytes
        self._digest = hashlib.sha256()
        self._offset = 0
        self._directory: list[bytes] = []

    @property
    def sha256(self) -> str:
        """Hash of everything written so far, in hex."""
        return self._digest.hexdigest()

    def _write(self, data: bytes) -> None:
        self._sink.write(data)
        self._digest.update(data)
        self._offset += len(data)
        self._on_bytes(len(data))

    def _head(
        self, name: str, method: int, crc: int, packed: int, size: int, executable: bool
    ) -> None:
        raw = name.encode("utf-8")
        assert max(self._offset, packed, size) < _LIMIT, f"{name} needs zip64"
        flags = 0 if name.isascii() else _UTF8
        mode = 0o100755 if executable else 0o100644
        common = struct.pack(
            "<HHHHHIIIHH",
            *(_VERSION, flags, method, 0, _DATE, crc, packed, size, len(raw), 0),
        )
        self._directory.append(
            struct.pack("<4sH", b"PK\x01\x02", _UNIX | _VERSION)
            + common
            + struct.pack("<HHHII", 0, 0, 0, mode << 16, self._offset)
            + raw
        )
        self._write(b"PK\x03\x04" + common + raw)

    def add(self, name: str, content: bytes) -> None:
        """Add a member, stored, mode 0644."""
        size = len(content)
        self._head(name, zipfile.ZIP_STORED, zlib.crc32(content), size, size, False)
        self._write(content)

    def copy(self, name: str, source: BinaryIO, info: zipfile.ZipInfo) -> None:
        """Add a member with the packed bytes it has in another archive.

        Args:
            name: Its name here.
            source: The other archive, open for reading.
            info: Its entry there.
        """
        source.seek(info.header_offset)
        head = source.read(30)
        name_bytes, extra_bytes = struct.unpack("<HH", head[26:30])
        source.seek(name_bytes + extra_bytes, 1)
        executable = bool((info.external_attr >> 16) & 0o111)
        packed = info.compress_size
        self._head(
            name, info.compress_type, info.CRC, packed, info.file_size, executable
        )
        while packed:
            data = source.read(min(packed, _CHUNK_BYTES))
            if not data:
                raise EOFError(f"{info.filename} ends early")
            self._write(data)
            packed -= len(data)

    def close(self) -> None:
        """Write the directory that ends the archive."""
        start, count = self._offset, len(self._directory)
        assert count < 0xFFFF, f"{count} members need zip64"
        for entry in self._directory:
            self._write(entry)
        size = self._offset - start
        self._write(
            struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, size, start, 0)
        )
