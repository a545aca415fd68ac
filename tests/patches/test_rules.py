# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Every rule that ``check`` has, broken once."""

from __future__ import annotations

import pytest

from hisparse_tools.check import check_series
from hisparse_tools.series import read_series
from toy import Toy, message


def problems(toy: Toy, text: str, lines: int = 1, files: int = 1) -> list[str]:
    """Return what is wrong with a patch of this message and size."""
    toy.source()
    for number in range(files):
        changed = b"".join(b"new %d\n" % i for i in range(lines))
        toy.write(f"vllm/file{number}.py", toy.files[f"vllm/file{number}.py"] + changed)
    toy.commit(text)
    toy.refresh()
    found = check_series(read_series(toy.project), toy.project.root)
    assert all(problem.remedy for problem in found)
    return [problem.text for problem in found]


@pytest.fixture
def wide_toy(toy: Toy) -> Toy:
    """A toy whose release has five files to change."""
    files = {f"vllm/file{number}.py": b"first\n" for number in range(5)}
    return Toy(toy.folder / "wide", {**toy.files, **files})


def test_good_patch_has_no_problem(wide_toy: Toy) -> None:
    assert problems(wide_toy, message()) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("core: add", "kernel: add", "subject 'kernel: add toy hook' does not read"),
        ("core: add", "add", "subject 'add toy hook' does not read"),
        ("toy hook", "x" * 70, "subject has 80 characters"),
        ("Why: a test.\n\n", "", "no 'Why:' section"),
        ("Why: a test.", "Why:", "no 'Why:' section"),
        ("Seam:", "Joint:", "no 'Seam:' section"),
        ("Alternatives:", "Others:", "no 'Alternatives:' section"),
        ("Off-state:", "Off:", "no 'Off-state:' section"),
        ("Tests: tests/unit\n", "", "no 'Tests:' trailer"),
        ("tests/unit", "tests/nowhere.py", "'Tests:' names tests/nowhere.py"),
        ("Upstream: no\n", "", "no 'Upstream:' trailer"),
        ("Remove-when: never\n", "", "no 'Remove-when:' trailer"),
        ("Signed-off-by: A Name <a@name.invalid>\n", "", "no 'Signed-off-by:' trailer"),
        ("<a@name.invalid>", "a@name.invalid", "is no name and mail"),
        ("Upstream: no", "Upstream: no\nChange-Id: x", "unknown trailer 'Change-Id:'"),
        ("Patch: 0310", "Patch: 0510", "id 0510 is not of area 'core'"),
    ],
)
def test_broken_message_is_found(
    wide_toy: Toy, old: str, new: str, problem: str
) -> None:
    text = message()
    assert old in text
    assert [p for p in problems(wide_toy, text.replace(old, new)) if problem in p]


@pytest.mark.parametrize(
    ("lines", "files", "found"),
    [
        (30, 1, []),
        (31, 1, ["31 changed lines in 1 files"]),
        (1, 3, []),
        (1, 4, ["4 changed lines in 4 files"]),
    ],
)
def test_large_patch_needs_a_reason(
    wide_toy: Toy, lines: int, files: int, found: list[str]
) -> None:
    assert problems(wide_toy, message(), lines, files) == found


def test_large_patch_with_a_reason_passes(wide_toy: Toy) -> None:
    text = message(extra="Size-reason: one table.\n")
    assert problems(wide_toy, text, 50, 5) == []


def test_ids_must_ascend(series_toy: Toy) -> None:
    series_toy.source()
    series_toy.write("vllm/other.py", b"x\n")
    series_toy.commit(message("0220", "config: add toy option"))
    series_toy.refresh()
    found = check_series(read_series(series_toy.project), series_toy.project.root)
    assert [problem.text for problem in found if "comes after" in problem.text] == [
        "id 0220 comes after 0410"
    ]


def test_file_name_must_follow_from_the_message(series_toy: Toy) -> None:
    path = series_toy.patch("0310")
    path.rename(path.with_name("0310-another-name.patch"))
    order = series_toy.project.patches / "series"
    order.write_text(order.read_text().replace(path.name, "0310-another-name.patch"))
    found = check_series(read_series(series_toy.project), series_toy.project.root)
    assert ["name does not follow" in problem.text for problem in found] == [True]


def test_patch_of_files_that_no_wheel_carries_is_found(series_toy: Toy) -> None:
    series_toy.replace_in_patch("0310", "vllm/engine.py", "csrc/engine.cu")
    found = check_series(read_series(series_toy.project), series_toy.project.root)
    assert ["changes csrc/engine.cu, which" in problem.text for problem in found] == [
        True
    ]
