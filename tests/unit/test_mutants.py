# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The table of mutations, and the tools that apply them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hisparse_tools.errors import ToolError
from hisparse_tools.mutants import (
    Bench,
    Fate,
    Mutant,
    chosen,
    copy_project,
    mirror_package,
    mutated,
    read_mutants,
)
from hisparse_tools.paths import Project

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = read_mutants(ROOT / "tests" / "mutants.toml")


def source_of(mutant: Mutant) -> Path:
    """Return the file that a mutant breaks, as the project has it."""
    if not mutant.in_vllm:
        return ROOT / mutant.file
    overlay = ROOT / "vllm_overlay" / mutant.file.removeprefix("vllm/")
    if overlay.exists():
        return overlay
    vllm = pytest.importorskip("vllm", reason="needs the patched vLLM")
    return Path(vllm.__file__).parents[1] / mutant.file


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_mutant_fits_the_code_and_names_tests_that_exist(mutant: Mutant) -> None:
    text = source_of(mutant).read_text(encoding="utf-8")
    assert mutated(text, mutant) != text
    for test in mutant.tests:
        file, *names = test.split("[")[0].split("::")
        tests = (ROOT / file).read_text(encoding="utf-8")
        for name in names:
            assert f"def {name}(" in tests or f"class {name}" in tests


def test_copy_of_the_project_has_what_mutants_break_and_run(tmp_path: Path) -> None:
    copy_project(Project(ROOT), tmp_path / "copy")
    for mutant in MUTANTS:
        tests = {test.split("::")[0] for test in mutant.tests}
        for file in tests if mutant.in_vllm else {mutant.file, *tests}:
            assert (tmp_path / "copy" / file).is_file()


def test_text_that_is_not_there_once_is_an_error() -> None:
    mutant = Mutant("f.py", "x", "y", (), "a reason")
    for text in ("", "xx"):
        with pytest.raises(ToolError, match=f"is there {len(text)} times, not once"):
            mutated(text, mutant)


def test_entry_without_a_field_is_an_error(tmp_path: Path) -> None:
    table = tmp_path / "m.toml"
    table.write_text("[[mutant]]\nfile = 'a'\nold = 'b'\nnew = 'c'\ntest = 'd'\n")
    with pytest.raises(ToolError, match="has no 'why'"):
        read_mutants(table)


ONE = Mutant("scripts/one.py", "a", "b", ("t",), "the first reason")
TWO = Mutant("bench/two.py", "a", "b", ("t",), "the second")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [ONE, TWO]),
        (["reason"], [ONE]),
        (["bench/"], [TWO]),
        (["first", "second"], [ONE, TWO]),
    ],
)
def test_words_choose_mutants_by_file_or_reason(
    words: list[str], expected: list[Mutant]
) -> None:
    assert chosen([ONE, TWO], words) == expected


def test_word_that_no_mutant_has_is_named() -> None:
    with pytest.raises(ToolError) as raised:
        chosen([ONE, TWO], ["first", "third", "Second"])
    assert raised.value.what.startswith("no mutant has 'third' or 'Second' in its file")
    assert "case matters" in raised.value.remedy


def test_mirror_has_one_copy_and_links_else(tmp_path: Path) -> None:
    site = tmp_path / "installed"
    for name in ("vllm/__init__.py", "vllm/a/b.py", "vllm/a/c.py", "vllm/d/e.py"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(name)
    copy = mirror_package(site, tmp_path / "mirror", "vllm/a/b.py")
    copy.write_text("mutated")
    assert (site / "vllm/a/b.py").read_text() == "vllm/a/b.py"
    assert (tmp_path / "mirror/vllm/a/b.py").read_text() == "mutated"
    assert (tmp_path / "mirror/vllm/a/c.py").is_symlink()
    assert (tmp_path / "mirror/vllm/d").is_symlink()
    assert (tmp_path / "mirror/vllm/__init__.py").read_text() == "vllm/__init__.py"


@pytest.mark.parametrize(
    ("new", "fate"),
    [
        ("return 2", Fate.KILLED),
        ("return 0 + 1", Fate.SURVIVED),
        ("return (", Fate.BROKEN),
    ],
)
def test_fate_follows_from_the_test(tmp_path: Path, new: str, fate: Fate) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "code.py").write_text("def f():\n    return 1\n")
    (project / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (project / "test_it.py").write_text(
        "import importlib.util as u\n"
        "spec = u.spec_from_file_location('m', 'code.py')\n"
        "m = u.module_from_spec(spec); spec.loader.exec_module(m)\n"
        "def test_f():\n    assert m.f() == 1\n"
    )
    bench = Bench(project, Path(sys.executable), tmp_path)
    mutant = Mutant("code.py", "return 1", new, ("test_it.py::test_f",), "x")
    assert bench.try_mutant(mutant) is fate
    assert (project / "code.py").read_text() == "def f():\n    return 1\n"
