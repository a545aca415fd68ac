# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Comparing the release's own tests with the unpatched release."""

from __future__ import annotations

from pathlib import Path

import pytest

from hisparse_tools.errors import ToolError
from hisparse_tools.upstream_tests import judge, read_changed

REPORT = """\
<testsuites><testsuite>
<testcase file="tests/v1/test_a.py" classname="tests.v1.test_a" name="test_one[x y]"/>
<testcase file="tests/v1/test_a.py" classname="tests.v1.test_a.TestB" name="test_two"/>
<testcase file="tests/v1/test_a.py" classname="tests.v1.test_a" name="test_three">
<failure message="x"/></testcase>
<testcase file="tests/v1/test_a.py" classname="tests.v1.test_a" name="test_four">
<skipped message="x"/></testcase>
<testcase file="tests/v1/test_a.py" classname="tests.v1.test_a" name="test_five"/>
<testcase file="tests/v1/test_a.py" classname="tests.v1.test_a" name="test_five">
<error message="x"/></testcase>
</testsuite></testsuites>
"""
PASSED = "tests/v1/test_a.py::test_one[x y]\ntests/v1/test_a.py::TestB::test_two\n"


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A junit report with one test of every kind."""
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    return path


def test_all_that_passed_still_pass(report: Path) -> None:
    verdict = judge(PASSED, {}, report)
    assert verdict.passed
    assert verdict.wanted == 2


@pytest.mark.parametrize("name", ["test_three", "test_four", "test_five"])
def test_failed_skipped_and_broken_tests_are_found(report: Path, name: str) -> None:
    test = f"tests/v1/test_a.py::{name}"
    verdict = judge(PASSED + test, {}, report)
    assert (verdict.broken, verdict.lost, verdict.passed) == ((test,), (), False)


def test_test_that_did_not_run_is_found(report: Path) -> None:
    verdict = judge(PASSED + "tests/v1/test_a.py::test_gone", {}, report)
    assert verdict.lost == ("tests/v1/test_a.py::test_gone",)
    assert not verdict.passed


def test_test_changed_on_purpose_is_left_out(report: Path) -> None:
    test = "tests/v1/test_a.py::test_three"
    changed = read_changed(f"# comment\n\n{test}  # the hook replaces it\n")
    assert changed == {test: "the hook replaces it"}
    assert judge(PASSED + test, changed, report).passed


def test_change_without_a_reason_is_refused() -> None:
    with pytest.raises(ToolError, match="without a reason"):
        read_changed("tests/v1/test_a.py::test_three\n")
