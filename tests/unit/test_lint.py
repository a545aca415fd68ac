# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What lint looks at."""

from __future__ import annotations

from pathlib import Path

import pytest

from hisparse_tools.lint import project_files, without_spdx
from hisparse_tools.paths import Project

LINES = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
)


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("", False),
        (LINES + "x = 1\n", False),
        ("#!/usr/bin/env python3\n" + LINES, False),
        ("x = 1\n", True),
        ("#!/usr/bin/env python3\nx = 1\n", True),
        ("x = 1\n" + LINES, True),
    ],
)
def test_licence_lines_come_first(tmp_path: Path, text: str, bare: bool) -> None:
    file = tmp_path / "file.py"
    file.write_text(text)
    assert without_spdx([file]) == ([file] if bare else [])


def test_every_python_file_of_the_project_is_looked_at(tmp_path: Path) -> None:
    names = ["bench/deep/a.py", "noxfile.py", "scripts/b.py", "tests/unit/c.py"]
    for name in [*names, "build/source/d.py", "scripts/e.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    found = project_files(Project(tmp_path))
    assert [path.relative_to(tmp_path).as_posix() for path in found] == names
