# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Reading the upstream source archive straight into a git repository."""

from __future__ import annotations

import subprocess
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from .errors import ToolError
from .git import EPOCH, IDENTITY, Git, require_git
from .progress import Bar

BASE_REF = "refs/heads/upstream"


@dataclass(frozen=True)
class Base:
    """The unpatched source in a repository.

    Attributes:
        commit: Commit id.
        tree: Tree id.
        crc: CRC-32 by path, to compare with a wheel's members without reading them.
    """

    commit: str
    tree: str
    crc: dict[str, int]


def _member_path(member: tarfile.TarInfo, archive: Path) -> str:
    parts = PurePosixPath(member.name).parts[1:]
    if not parts or ".." in parts or member.name.startswith("/"):
        raise ToolError(
            f"{archive.name} holds a file with a forbidden name: {member.name!r}",
            "use the archive pinned in upstream.toml",
        )
    return "/".join(parts)


def _quote(path: str) -> bytes:
    # fast-import reads to the end of the line unless the path starts with a quote
    if path.startswith('"') or "\n" in path:
        raise ToolError(
            f"the source archive holds a file with a forbidden name: {path!r}",
            "use the archive pinned in upstream.toml",
        )
    return path.encode("utf-8")


def _feed(archive: Path, sink: IO[bytes]) -> dict[str, int]:
    crc: dict[str, int] = {}
    name, mail = IDENTITY
    sink.write(f"commit {BASE_REF}\nmark :1\n".encode())
    sink.write(f"author {name} <{mail}> {EPOCH}\n".encode())
    sink.write(f"committer {name} <{mail}> {EPOCH}\n".encode())
    title = f"upstream: {archive.name}\n".encode()
    sink.write(b"data %d\n%s\n" % (len(title), title))
    size = archive.stat().st_size
    with (
        open(archive, "rb") as raw,
        Bar("importing the source", size) as bar,
        tarfile.open(fileobj=raw, mode="r:*") as tar,
    ):
        before = 0
        for member in tar:
            if member.isdir():
                continue
            path = _member_path(member, archive)
            file = tar.extractfile(member) if member.isreg() else None
            if file is None:
                raise ToolError(
                    f"{archive.name} holds {member.name}, which is no plain file",
                    "use the archive pinned in upstream.toml",
                )
            content = file.read()
            crc[path] = zlib.crc32(content)
            mode = b"100755" if member.mode & 0o111 else b"100644"
            sink.write(b"M %s inline %s\n" % (mode, _quote(path)))
            sink.write(b"data %d\n" % len(content))
            sink.write(content)
            sink.write(b"\n")
            now = raw.tell()
            bar.advance(now - before)
            before = now
    sink.write(b"done\n")
    return crc


def import_sdist(git: Git, archive: Path) -> Base:
    """Import a source archive as the first commit of a repository.

    Nothing is unpacked on disk: the archive streams into ``git fast-import``, which
    takes seconds where adding thousands of files takes much longer, and neither umask
    nor ignore rules can change what arrives.

    Args:
        git: An empty repository.
        archive: The ``.tar.gz``; its single top folder is dropped.

    Raises:
        ToolError: If the archive cannot be read.
    """
    require_git()
    command = git.command(
        ["-c", "core.compression=0", "-c", "fastimport.unpackLimit=0"]
    )
    command += ["fast-import", "--quiet", "--depth=0", "--done"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=git.env()
    )
    assert process.stdin is not None and process.stderr is not None
    try:
        crc = _feed(archive, process.stdin)
        process.stdin.close()
        message = process.stderr.read().decode("utf-8", "replace")
        if process.wait():
            raise ToolError(
                f"git could not import {archive.name}: {message.strip()}",
                "check the free space in the cache folder, then try again",
            )
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ToolError(
            f"{archive.name} is no readable source archive: {error}",
            "use the archive pinned in upstream.toml",
        ) from error
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdin = None
        process.stderr.close()
    commit = git.text("rev-parse", BASE_REF)
    return Base(commit, git.text("rev-parse", f"{commit}^{{tree}}"), crc)
