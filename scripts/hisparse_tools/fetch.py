# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Fetching pinned files through pip, by hash.

pip does the transfer, so the user's index, mirrors, proxies, certificates and pip
cache all apply. Whatever pip says, a file counts only once its SHA-256 is the pinned
one, and it appears in the cache under that hash in a single rename.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from .atomic import sha256_of
from .errors import ToolError
from .paths import cache_dir, scratch
from .pins import Artifact, Pins, WheelPin
from .progress import say
from .venvs import make_venv, venv_python

# pip asks a source archive for its metadata before it keeps it, and would install the
# build requirements (torch!) and run setup.py for that. This stands in for setuptools,
# so that nothing is installed and no code of the archive runs.
_STUB = """\
import os


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    name = "{project}-{version}.dist-info"
    folder = os.path.join(metadata_directory, name)
    os.makedirs(folder)
    with open(os.path.join(folder, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {project}\\nVersion: {version}\\n")
    with open(os.path.join(folder, "WHEEL"), "w") as file:
        file.write("Wheel-Version: 1.0\\n")
    return name
"""


def _pip_python() -> str:
    """Return an interpreter that has pip; a bare one gets a small environment."""
    if importlib.util.find_spec("pip") is not None:
        return sys.executable
    tag = f"{sys.version_info[0]}.{sys.version_info[1]}-{sysconfig.get_platform()}"
    folder = cache_dir() / "venvs" / f"pip-{tag}"
    if not venv_python(folder).exists():
        make_venv(folder, lambda python: None)
    return str(venv_python(folder))


def _write_stub(folder: Path, project: str, version: str) -> Path:
    package = folder / "stub" / "setuptools"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "build_meta.py").write_text(
        _STUB.format(project=project, version=version)
    )
    return package.parent


def _run_pip(
    artifact: Artifact, version: str, options: list[str], folder: Path
) -> None:
    requirement = folder / "requirement.txt"
    requirement.write_text(
        f"{artifact.project}=={version} --hash=sha256:{artifact.sha256}\n"
    )
    command = [_pip_python(), "-m", "pip", "download", "--no-deps"]
    command += ["--disable-pip-version-check", "--require-hashes"]
    command += ["-r", str(requirement), "-d", str(folder / "files"), *options]
    env = dict(os.environ)
    stub = str(_write_stub(folder, artifact.project, version).resolve())
    env["PYTHONPATH"] = stub
    # pip's own temporary files go with the scratch folder, even if pip is killed.
    (folder / "tmp").mkdir()
    env["TMPDIR"] = str((folder / "tmp").resolve())
    # Standard output, with pip's progress bar, stays on the user's terminal.
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        errors = []
        for line in process.stderr:
            if "is ignored: it is neither a file" not in line:
                sys.stderr.write(line)
            errors.append(line)
        status = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if status:
        raise _explain(artifact, "".join(errors))


def _explain(artifact: Artifact, errors: str) -> ToolError:
    if "DO NOT MATCH THE HASHES" in errors:
        return ToolError(
            f"the package index offers another {artifact.file} than the pinned one "
            f"(sha256 {artifact.sha256})",
            "do not use that file; check which index or mirror pip is set to "
            "(pip config list)",
        )
    if "No space left" in errors:
        return ToolError(
            f"no space left while fetching {artifact.file}",
            "free some space, or set HISPARSE_CACHE to a folder on a larger disk",
        )
    return ToolError(
        f"{artifact.file} could not be fetched with pip (its messages are above)",
        "check the network, and pip's proxy and index settings (pip config list); or "
        "fetch the file elsewhere and pass it with --sdist or --wheel",
    )


def _check_hash(path: Path, artifact: Artifact) -> None:
    found = sha256_of(path)
    if found != artifact.sha256:
        raise ToolError(
            f"{path} has sha256 {found}, but upstream.toml pins {artifact.sha256}",
            f"use {artifact.file} as published on the package index",
        )


def _given(path: Path, artifact: Artifact) -> Path:
    if not path.is_file():
        raise ToolError(
            f"there is no file {path}",
            f"pass the path of {artifact.file}, or leave the option out to fetch it",
        )
    _check_hash(path, artifact)
    return path.resolve()


def _fetch(artifact: Artifact, version: str, options: list[str]) -> Path:
    folder = cache_dir() / "downloads" / artifact.sha256
    final = folder / artifact.file
    if final.is_file():
        if sha256_of(final) == artifact.sha256:
            return final
        say(f"  {final} is damaged: fetching it again")
        final.unlink()
    with scratch() as temporary:
        (temporary / "files").mkdir()
        _run_pip(artifact, version, options, temporary)
        path = temporary / "files" / artifact.file
        if not path.is_file():
            got = sorted(p.name for p in (temporary / "files").iterdir())
            raise ToolError(
                f"pip fetched {', '.join(got) or 'nothing'} instead of {artifact.file}",
                "check pip's settings (pip config list), or pass the file with "
                "--sdist or --wheel",
            )
        _check_hash(path, artifact)
        folder.mkdir(parents=True, exist_ok=True)
        os.replace(path, final)
    return final


def get_sdist(pins: Pins, given: Path | None = None) -> Path:
    """Return the pinned source archive, from ``given``, the cache or the index.

    Raises:
        ToolError: If it cannot be had, or its hash is not the pinned one.
    """
    if given is not None:
        return _given(given, pins.sdist)
    options = ["--no-build-isolation", "--no-binary", pins.sdist.project]
    return _fetch(pins.sdist, pins.version, options)


def get_wheel(pins: Pins, pin: WheelPin, given: Path | None = None) -> Path:
    """Return a pinned wheel, from ``given``, the cache or the index.

    Raises:
        ToolError: If it cannot be had, or its hash is not the pinned one.
    """
    if given is not None:
        return _given(given, pin.artifact)
    # Named in full, so that a wheel for another machine can be fetched too.
    options = ["--only-binary", ":all:", "--platform", pin.platform]
    options += ["--implementation", "cp", "--abi", "abi3", "--python-version", "3.12"]
    return _fetch(pin.artifact, pins.version, options)
