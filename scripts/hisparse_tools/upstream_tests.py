# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The release's own tests against a built wheel, compared with the release itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .apply import Applied
from .env import requirements_env, site_packages
from .errors import ToolError
from .git import Git
from .paths import Project
from .progress import say

GROUPS = {
    "core": (
        "tests/v1/core",
        "tests/v1/test_kv_cache_spec_registry.py",
        "tests/v1/test_serial_utils.py",
        "tests/test_config.py",
    ),
    "kvc": ("tests/v1/kv_connector/unit",),
}
_SOURCES = ("tests", "examples/disaggregated")
_SHOWN = 50
# Settings of a CPU run of ours; here the release is to run as it is.
_OURS = ("TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER")


@dataclass(frozen=True)
class Verdict:
    """What became of the tests that pass on the unpatched release.

    Attributes:
        wanted: How many must pass.
        broken: Those that ran and did not pass.
        lost: Those that did not run.
    """

    wanted: int
    broken: tuple[str, ...]
    lost: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing changed."""
        return not self.broken and not self.lost


def read_changed(text: str) -> dict[str, str]:
    """Read ``changed.txt``: the reason by test id.

    Raises:
        ToolError: If a line has no reason.
    """
    changed = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        test, mark, reason = line.partition("  # ")
        if not mark or not reason.strip():
            raise ToolError(
                f"changed.txt names {line.strip()} without a reason",
                "write: the test's id, two spaces, '# ' and the reason",
            )
        changed[test.strip()] = reason.strip()
    return changed


def read_report(report: Path) -> Iterator[tuple[str, bool]]:
    """Yield each test of a junit report: its id, and whether it passed."""
    for case in ET.parse(report).getroot().iter("testcase"):
        file, name = case.get("file"), case.get("classname") or ""
        module = file[:-3].replace("/", ".") if file else name
        inner = name[len(module) :].strip(".") if name.startswith(module) else ""
        parts = (file or name, inner.replace(".", "::"), case.get("name"))
        bad = any(
            case.find(kind) is not None for kind in ("failure", "error", "skipped")
        )
        yield "::".join(part for part in parts if part), not bad


def judge(expected: str, changed: dict[str, str], report: Path) -> Verdict:
    """Compare a report with what passes on the unpatched release.

    Args:
        expected: Text of a pass list, one test id a line.
        changed: Tests that the series changes on purpose.
        report: The junit report.
    """
    wanted = {line.strip() for line in expected.splitlines() if line.strip()}
    wanted -= set(changed)
    got: dict[str, bool] = {}
    for test, passed in read_report(report):
        got[test] = passed and got.get(test, True)
    return Verdict(
        len(wanted),
        tuple(sorted(test for test in wanted if got.get(test) is False)),
        tuple(sorted(test for test in wanted if test not in got)),
    )


def _mend_torchvision(site: Path) -> None:
    """Guard fake kernels of operators that do not load beside a CPU build of torch."""
    file = site / "torchvision" / "_meta_registrations.py"
    text = file.read_text()
    for name in ("nms", "qnms"):
        register = f'torch.library.register_fake("torchvision::{name}")'
        guarded = f"({register} if torchvision.extension._has_ops() else lambda f: f)"
        text = text.replace(f"@{register}", f"@{guarded}")
    file.write_text(text)


def extras(project: Project) -> Path:
    """Return the folder of packages that go in front for these tests only."""
    python = requirements_env(
        project.locks / "requirements-upstream.txt",
        "upstream",
        "--no-deps",
        finish=_mend_torchvision,
    )
    return site_packages(python)


def prepare(
    project: Project, applied: Applied, python: Path, folder: Path
) -> dict[str, str]:
    """Put the tests and what they need in a folder; return their environment."""
    ours = project.root / "tests" / "upstream"
    folder.mkdir()
    Git(applied.git.git_dir, folder).raw("checkout", applied.head, "--", *_SOURCES)
    shutil.copy(ours / "pytest_upstream.ini", folder / "pytest.ini")
    plugins = folder / "plugins"
    plugins.mkdir()
    shutil.copy(ours / "fastgc.py", plugins)
    env = {key: value for key, value in os.environ.items() if key not in _OURS}
    env.update(
        PYTHONPATH=os.pathsep.join([str(plugins), str(extras(project))]),
        PYTHONNOUSERSITE="1",
        HF_HOME=str(folder / "hf"),
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        RAY_USAGE_STATS_ENABLED="0",
        VLLM_CACHE_ROOT=str(folder / "cache"),
        VLLM_CONFIG_ROOT=str(folder / "config"),
    )
    command = [str(python), str(ours / "stand_ins.py"), str(folder / "hf")]
    subprocess.run(command, check=True, env=env, cwd=folder)
    return env


def run_group(
    project: Project, group: str, python: Path, folder: Path, env: dict[str, str]
) -> Verdict:
    """Run one group of tests and compare it with the unpatched release.

    Raises:
        ToolError: If pytest wrote no report.
    """
    ours = project.root / "tests" / "upstream"
    report = folder / f"{group}.xml"
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-p", "fastgc"]
    command += ["-n", "1", "--timeout", "60", "-q", "--tb=short", "--color=no"]
    command += ["-o", "junit_family=xunit1", "--junitxml", str(report)]
    command += [f"@{ours / 'args.txt'}", *GROUPS[group]]
    with subprocess.Popen(command, env=env, cwd=folder) as process:
        try:
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
    if not report.exists():
        raise ToolError(
            f"the release's own tests of group {group} did not run (see above)",
            "run ./run tests first: the build itself may be broken",
        )
    changed = read_changed((ours / "changed.txt").read_text(encoding="utf-8"))
    expected = (ours / f"pass-{group}.txt").read_text(encoding="utf-8")
    verdict = judge(expected, changed, report)
    for title, tests in (
        ("no longer passes", verdict.broken),
        ("did not run", verdict.lost),
    ):
        for test in tests[:_SHOWN]:
            say(f"{title}: {test}")
        if len(tests) > _SHOWN:
            say(f"{title}: {len(tests) - _SHOWN} more")
    return verdict
