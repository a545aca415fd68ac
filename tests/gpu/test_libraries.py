# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A library that is not there is a skip; one that is there and broken is a failure."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import libraries
from hisparse_tools.library_checks import NOT_THIS_GPU
from libraries import library, needs_capability


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder whose modules can be imported as `a_library.NAME`."""
    folder = tmp_path / "a_library"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == folder.name]:
        del sys.modules[name]


def test_a_library_that_is_there_is_given(package: Path) -> None:
    (package / "kernels.py").write_text("answer = 42\n")
    assert library("a_library.kernels").answer == 42


@pytest.mark.parametrize("name", ["no_such_library.kernels", "a_library.no_kernels"])
def test_a_library_that_is_not_installed_is_skipped(package: Path, name: str) -> None:
    with pytest.raises(pytest.skip.Exception, match=f"{name} is not installed"):
        library(name)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import no_such_module", ModuleNotFoundError),
        ("import a_library.no_such_part", ModuleNotFoundError),
        ("raise ImportError('libcudart.so.13: not found')", ImportError),
        ("from a_library import no_such_name", ImportError),
        ("raise OSError('undefined symbol')", OSError),
    ],
)
def test_a_library_that_cannot_be_imported_is_a_failure(
    package: Path, text: str, error: type[Exception]
) -> None:
    (package / "broken.py").write_text(text)
    try:
        with pytest.raises(error):
            library("a_library.broken")
    except pytest.skip.Exception:
        pytest.fail("it was skipped")


def test_a_gpu_that_a_library_has_no_kernels_for_is_named_as_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    needs_capability("a library", (9, 12))
    with pytest.raises(pytest.skip.Exception, match=NOT_THIS_GPU) as raised:
        needs_capability("a library", (9, 10))
    assert "a library needs compute capability 9.x or 10.x" in str(raised.value)


def test_on_a_gpu_a_fixture_gives_the_library_or_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, package: Path
) -> None:
    (package / "kernels.py").touch()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def given(stand_in: object, lacks: str | None = None) -> Any:
        fixture = libraries.kernels_fixture(
            stand_in, "a_library.kernels", (9,), lambda module: lacks
        )
        return fixture.__wrapped__()

    monkeypatch.setattr(libraries, "ON_GPU", False)
    assert given("a stand-in") == "a stand-in"
    monkeypatch.setattr(libraries, "ON_GPU", True)
    assert given("a stand-in").__name__ == "a_library.kernels"
    with pytest.raises(pytest.skip.Exception, match="no parts"):
        given("a stand-in", "no parts")
