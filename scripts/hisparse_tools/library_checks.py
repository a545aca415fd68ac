# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What became of the checks of attention libraries, by pytest's report."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

# Reasons of skips begin with it where another GPU is needed, not another library.
NOT_THIS_GPU = "not for this GPU"
_MODULE = "test_padded_blocks"


@dataclass(frozen=True)
class LibraryChecks:
    """Checks of libraries' kernels.

    Attributes:
        passed: How many passed.
        other_gpu: How many are for another GPU.
        missing: Why others were skipped, one reason for each.
    """

    passed: int = 0
    other_gpu: int = 0
    missing: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether all that this GPU can show was checked."""
        return self.passed > 0 and not self.missing

    def text(self) -> str:
        """The numbers, and every reason once."""
        reasons = f" ({'; '.join(dict.fromkeys(self.missing))})" if self.missing else ""
        return (
            f"library checks: {self.passed} passed, {len(self.missing)} skipped"
            f"{reasons}, {self.other_gpu} {NOT_THIS_GPU}"
        )


def read_library_checks(report: Path) -> LibraryChecks:
    """Read a junit report; without one, as after a crash, nothing passed."""
    if not report.exists():
        return LibraryChecks()
    passed, other_gpu, missing = 0, 0, []
    for case in ET.parse(report).getroot().iter("testcase"):
        if not (case.get("classname") or "").endswith(_MODULE):
            continue
        skipped = case.find("skipped")
        if skipped is not None:
            reason = skipped.get("message") or "no reason"
            if reason.startswith(NOT_THIS_GPU):
                other_gpu += 1
            else:
                missing.append(reason)
        elif case.find("failure") is None and case.find("error") is None:
            passed += 1
    return LibraryChecks(passed, other_gpu, tuple(missing))
