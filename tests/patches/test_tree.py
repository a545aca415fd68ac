# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Source and refresh: exact both ways, and no work is ever lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hisparse_tools import atomic
from hisparse_tools.errors import ToolError
from hisparse_tools.pins import read_pins
from hisparse_tools.series import read_series
from hisparse_tools.tree import open_tree
from toy import Toy, members, message, surround_with_repository


def test_round_trip_changes_nothing(series_toy: Toy) -> None:
    before = series_toy.snapshot()
    series_toy.source(force=True)
    assert series_toy.refresh() == []
    assert series_toy.snapshot() == before


def test_round_trip_with_hostile_settings_changes_nothing(
    series_toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = series_toy.snapshot()
    git = series_toy.source(force=True)
    for name, value in {
        "diff.noprefix": "true",
        "diff.context": "9",
        "diff.algorithm": "patience",
        "diff.renames": "copies",
        "diff.suppressBlankEmpty": "true",
        "format.signature": "me",
        "format.numbered": "true",
        "format.headers": "X-Mine: 1\n",
        "format.pretty": "oneline",
        "core.abbrev": "7",
        "core.autocrlf": "true",
        "user.name": "Someone",
    }.items():
        git.raw("config", name, value)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_DIFF_OPTS", "-u9")
    assert series_toy.refresh() == []
    assert series_toy.snapshot() == before


def test_tree_has_one_commit_per_patch_with_its_overlay_files(series_toy: Toy) -> None:
    git = series_toy.source(force=True)
    log = git.text("log", "--reverse", "--format=%s", "upstream..series").splitlines()
    assert log == ["core: add toy hook", "worker: call toy pages"]
    names = git.text("show", "--format=", "--name-only", "series").splitlines()
    assert names == [
        "vllm/core/pool.py",
        "vllm/v1/hisparse/README.md",
        "vllm/v1/hisparse/pages.py",
    ]
    assert git.text("status", "--porcelain", "--ignored") == ""


def test_two_trees_have_the_same_commit_ids(series_toy: Toy, tmp_path: Path) -> None:
    one = series_toy.source(tmp_path / "one").text("rev-parse", "HEAD")
    assert series_toy.source(tmp_path / "two").text("rev-parse", "HEAD") == one


def test_refresh_writes_patches_overlay_series_pins_and_readme(toy: Toy) -> None:
    toy.source()
    toy.edit("vllm/engine.py", b"line 30\n", b"line 30\nhook()\n")
    toy.write("vllm/v1/hisparse/pages.py", b"PAGES = 1\n")
    toy.commit(message())
    changed = toy.refresh()
    assert changed == [
        "README.md",
        "patches/0310-core-add-toy-hook.patch",
        "patches/series",
        "upstream.toml",
        "vllm_overlay/v1/hisparse/pages.py",
    ]
    (patch,) = read_series(toy.project).patches
    assert patch.message.overlay == ["vllm/v1/hisparse/pages.py"]
    assert b"PAGES" not in patch.content
    tree = open_tree(toy.tree)[0].text("rev-parse", "HEAD^{tree}")
    assert read_pins(toy.project.pins_file).tree == tree
    assert "[0310](patches/0310-core-add-toy-hook.patch)" in (
        toy.project.readme.read_text()
    )
    assert "# kept\n" in toy.project.pins_file.read_text()
    assert toy.refresh() == []


def test_refresh_follows_a_changed_a_renamed_and_a_dropped_patch(toy: Toy) -> None:
    toy.with_series()
    git = open_tree(toy.tree)[0]
    git.raw("reset", "--hard", "HEAD~1")
    toy.commit(message("0310", "core: add other hook"), "--amend")
    changed = toy.refresh()
    assert "patches/0310-core-add-toy-hook.patch" in changed
    assert [patch.name for patch in read_series(toy.project).patches] == [
        "0310-core-add-other-hook.patch"
    ]
    assert list(toy.project.overlay.rglob("*")) == []
    toy.build()


def test_overlay_trailers_follow_the_files(series_toy: Toy) -> None:
    series_toy.source(force=True)
    (series_toy.tree / "vllm/v1/hisparse/README.md").unlink()
    series_toy.write("vllm/v1/hisparse/kernels.py", b"")
    series_toy.commit(
        message("0410", "worker: call toy pages", "Overlay: v1/wrong.py\n"), "--amend"
    )
    series_toy.refresh()
    assert read_series(series_toy.project).patches[1].message.values("Overlay") == [
        "v1/hisparse/kernels.py",
        "v1/hisparse/pages.py",
    ]


AWKWARD = {
    "crlf": (b"one\r\ntwo\r\nthree\r\n", b"one\r\n2\r\nthree\r\n"),
    "mixed line ends": (b"one\r\ntwo\nthree\r\n", b"one\ntwo\r\nthree\r\n"),
    "no newline at the end": (b"one\ntwo", b"one\n2"),
    "newline at the end added": (b"one\ntwo", b"one\ntwo\n"),
    "emptied": (b"one\ntwo\n", b""),
    "filled": (b"", b"one\n"),
    "binary": (bytes(range(256)) * 4, bytes(reversed(range(256))) * 4),
    "not utf-8": (b"caf\xe9\nx\n", b"caf\xe9\ny\n"),
    "trailing blanks": (b"one\t \n\n\n", b"one\n \t\n\n"),
    "mail-like lines": (
        b"From me\n",
        b"From me\n-- \nFrom 0000 Mon Sep 17\n---\ndiff --git a/x b/x\n>From you\n",
    ),
    "form feed": (b"a\x0cb\nc\n", b"a\x0cb\nd\x0c\n"),
    "conflict marks": (b"a\n", b"<<<<<<< HEAD\na\n=======\nb\n>>>>>>> x\n"),
}


@pytest.mark.parametrize("case", AWKWARD)
@pytest.mark.parametrize("name", ["vllm/file.py", "vllm/é x'\"$.txt"])
def test_awkward_content_survives_the_round_trip(
    tmp_path: Path, case: str, name: str
) -> None:
    old, new = AWKWARD[case]
    toy = Toy(tmp_path / "t")
    toy.files[name] = old
    toy = Toy(tmp_path / "u", toy.files)
    toy.source()
    toy.write(name, new)
    toy.write("vllm/fresh " + Path(name).name, new)
    toy.commit(message())
    toy.refresh()
    got = members(toy.build().path)
    assert got[name] == new
    assert got["vllm/fresh " + Path(name).name] == new
    toy.source(force=True)
    assert (toy.tree / name).read_bytes() == new
    assert toy.refresh() == []


def test_attribute_files_of_the_release_change_nothing(tmp_path: Path) -> None:
    files = Toy(tmp_path / "t").files
    files[".gitattributes"] = (
        b"* text eol=crlf ident -diff\n*.py working-tree-encoding=UTF-16\n"
    )
    files["vllm/engine.py"] += b"$Id: x $\n"
    toy = Toy(tmp_path / "u", files).with_series()
    assert members(toy.build().path)["vllm/engine.py"].endswith(b"$Id: x $\n")
    toy.source(force=True)
    assert (toy.tree / "vllm/other.py").read_bytes() == files["vllm/other.py"]
    assert toy.refresh() == []


def test_change_of_an_executable_file_keeps_its_mode(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "t", executable="vllm/engine.py").with_series()
    assert b"100755" in toy.patch("0310").read_bytes()
    toy.source(force=True)
    assert os.access(toy.tree / "vllm/engine.py", os.X_OK)
    assert toy.refresh() == []


def test_renamed_file_leaves_as_a_patch_and_arrives_as_overlay(toy: Toy) -> None:
    toy.source()
    (toy.tree / "vllm/other.py").rename(toy.tree / "vllm/better.py")
    toy.commit(message())
    toy.refresh()
    got = members(toy.build().path)
    assert "vllm/other.py" not in got
    assert got["vllm/better.py"] == toy.files["vllm/other.py"]


def test_change_of_upstream_tests_stays_in_the_patch(toy: Toy) -> None:
    toy.source()
    toy.edit("vllm/engine.py", b"line 30\n", b"line thirty\n")
    toy.write("tests/test_new.py", b"def test_new(): pass\n")
    toy.commit(message())
    toy.refresh()
    assert b"tests/test_new.py" in toy.patch("0310").read_bytes()
    assert not [name for name in members(toy.build().path) if "test_new" in name]


def test_author_date_and_non_ascii_message_are_kept(toy: Toy) -> None:
    toy.source()
    toy.edit("vllm/engine.py", b"line 30\n", b"line thirty\n")
    toy.commit(
        message(
            subject="core: add a très lengthy subject — with a dash, and more words"
        ),
        "--author=Zoë Ünal <zoe@name.invalid>",
        "--date=2026-11-05T12:34:56+0530",
    )
    toy.refresh()
    (patch,) = read_series(toy.project).patches
    assert patch.message.subject.startswith("core: add a très lengthy subject — with")
    git = toy.source(force=True)
    assert (
        git.text("log", "-1", "--format=%an %aI")
        == "Zoë Ünal 2026-11-05T12:34:56+05:30"
    )


@pytest.mark.parametrize("subject", ["core: [x] y", "[core] x", "Re: x", "core: a  b"])
def test_awkward_subject_survives_the_round_trip(toy: Toy, subject: str) -> None:
    toy.source()
    toy.edit("vllm/engine.py", b"line 30\n", b"line thirty\n")
    toy.commit(message(subject=subject))
    toy.refresh()
    (patch,) = read_series(toy.project).patches
    assert patch.message.subject == subject
    toy.build()


def test_message_that_a_mail_cannot_carry_is_refused(toy: Toy) -> None:
    toy.source()
    toy.edit("vllm/engine.py", b"line 30\n", b"line thirty\n")
    toy.commit(message(why="see\n\n---\n\nthe rest."))
    before = toy.snapshot()
    with pytest.raises(ToolError, match="0310-"):
        toy.refresh()
    assert toy.snapshot() == before


# Refresh refuses, and changes nothing


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vllm/engine.py", b"changed\n"),
        ("vllm/new.py", b"new\n"),
        ("vllm/hidden.py", b"ignored by upstream's rules\n"),
    ],
)
def test_dirty_tree_is_refused(series_toy: Toy, name: str, content: bytes) -> None:
    series_toy.source(force=True)
    series_toy.write(name, content)
    before = series_toy.snapshot()
    with pytest.raises(ToolError, match=f"changes that are in no commit: {name}"):
        series_toy.refresh()
    assert series_toy.snapshot() == before


def test_leftovers_of_tools_do_not_count_as_dirty(series_toy: Toy) -> None:
    series_toy.source(force=True)
    series_toy.write("vllm/run.log", b"ignored\n")
    assert series_toy.refresh() == []


def test_unfinished_rebase_is_refused(series_toy: Toy) -> None:
    git = series_toy.source(force=True)
    (git.git_dir / "rebase-merge").mkdir()
    with pytest.raises(ToolError, match="an unfinished rebase-merge"):
        series_toy.refresh()


def refused(toy: Toy, text: str, match: str) -> ToolError:
    """Commit what is there, and check that refresh refuses it and changes nothing."""
    toy.commit(text)
    before = toy.snapshot()
    with pytest.raises(ToolError, match=match) as caught:
        toy.refresh()
    assert toy.snapshot() == before
    return caught.value


@pytest.mark.parametrize("name", ["csrc/kernel.cu", "setup.py", "requirements/new.txt"])
def test_commit_that_a_repack_cannot_carry_is_refused(toy: Toy, name: str) -> None:
    toy.source()
    toy.write("vllm/engine.py", b"changed\n")
    toy.write(name, b"changed\n")
    refused(toy, message(), f"changes {name}, which a repacked wheel cannot carry")


def test_commit_with_bytecode_is_refused(toy: Toy) -> None:
    toy.source()
    toy.write("vllm/engine.py", b"changed\n")
    toy.write("vllm/__pycache__/engine.cpython-311.pyc", b"\0")
    refused(toy, message(), "which Python made")


def test_commit_that_changes_the_version_file_is_refused(toy: Toy) -> None:
    toy.source()
    toy.write("vllm/_version.py", b"")
    refused(toy, message(), "which every build writes itself")


def test_commit_with_a_link_is_refused(toy: Toy) -> None:
    toy.source()
    toy.write("vllm/engine.py", b"changed\n")
    (toy.tree / "vllm/link.py").symlink_to("engine.py")
    refused(toy, message(), "vllm/link.py as a link")


@pytest.mark.parametrize("name", ["vllm/engine.py", "vllm/fresh.py"])
def test_commit_that_sets_a_mode_is_refused(toy: Toy, name: str) -> None:
    toy.source()
    toy.write("vllm/other.py", b"changed\n")
    toy.write(name, b"changed\n")
    (toy.tree / name).chmod(0o755)
    refused(toy, message(), f"sets the mode of {name} to 100755")


def test_commit_with_only_overlay_files_is_refused(toy: Toy) -> None:
    toy.source()
    toy.write("vllm/v1/hisparse/pages.py", b"")
    refused(toy, message(), "changes only overlay files")


def test_empty_commit_is_refused(toy: Toy) -> None:
    toy.source()
    toy.commit(message(), "--allow-empty")
    with pytest.raises(ToolError, match="changes nothing"):
        toy.refresh()


@pytest.mark.parametrize("new", [b"PAGES = 2\n", None])
def test_later_change_of_an_overlay_file_is_refused(
    series_toy: Toy, new: bytes | None
) -> None:
    series_toy.source(force=True)
    series_toy.edit("vllm/other.py", b"other 3\n", b"other three\n")
    if new is None:
        (series_toy.tree / "vllm/v1/hisparse/pages.py").unlink()
    else:
        series_toy.write("vllm/v1/hisparse/pages.py", new)
    error = refused(
        series_toy, message("0510", "attention: more"), "an earlier commit brings in"
    )
    owner = open_tree(series_toy.tree)[0].text("rev-parse", "HEAD~1")
    assert f"git commit --fixup {owner[:12]}" in error.remedy
    assert "--autosquash" in error.remedy


def test_commit_without_an_id_is_refused_and_told_a_free_one(series_toy: Toy) -> None:
    series_toy.source(force=True)
    series_toy.write("vllm/other.py", b"changed\n")
    error = refused(
        series_toy, message(None, "worker: do more"), "has no 'Patch: NNNN' trailer"
    )
    assert "'Patch: 0420' is free" in error.remedy


def test_commit_with_the_id_of_another_is_refused(series_toy: Toy) -> None:
    series_toy.source(force=True)
    series_toy.write("vllm/other.py", b"changed\n")
    refused(series_toy, message("0410", "worker: do more"), "uses patch id 0410")


def test_fixup_that_was_not_folded_in_is_refused(series_toy: Toy) -> None:
    series_toy.source(force=True)
    series_toy.write("vllm/other.py", b"changed\n")
    refused(series_toy, "fixup! core: add toy hook\n", "is not folded in yet")


def test_merge_is_refused(series_toy: Toy) -> None:
    git = series_toy.source(force=True)
    git.raw("checkout", "-q", "-b", "side", "upstream")
    series_toy.write("vllm/other.py", b"changed\n")
    series_toy.commit(message("0510", "attention: side"))
    git.raw("merge", "-q", "-m", message("0610", "connectors: merge"), "series")
    with pytest.raises(ToolError, match="is a merge or does not follow"):
        series_toy.refresh()


def test_branch_from_elsewhere_is_refused(series_toy: Toy) -> None:
    git = series_toy.source(force=True)
    git.raw("checkout", "-q", "--orphan", "other")
    git.raw("commit", "-q", "-m", "other")
    with pytest.raises(ToolError, match="does not descend from its 'upstream' commit"):
        series_toy.refresh()


def test_tree_of_another_release_is_refused(series_toy: Toy) -> None:
    series_toy.source(force=True)
    tree = read_pins(series_toy.project.pins_file).tree
    series_toy.write_pins("0" * 40, tree)
    with pytest.raises(ToolError, match="from another release than upstream.toml pins"):
        series_toy.refresh()


def test_series_that_changed_since_the_tree_was_made_is_not_overwritten(
    series_toy: Toy,
) -> None:
    series_toy.source(force=True)
    series_toy.edit("vllm/other.py", b"other 3\n", b"other three\n")
    series_toy.commit(message("0510", "attention: more"))
    pages = series_toy.project.overlay / "v1/hisparse/pages.py"
    pages.write_bytes(b"PAGES = 3\n")
    with pytest.raises(ToolError, match="changed since .* was made from them"):
        series_toy.refresh()
    assert pages.read_bytes() == b"PAGES = 3\n"
    series_toy.refresh(force=True)
    assert pages.read_bytes() == b"PAGES = 1\n"


def test_folder_inside_another_repository_is_refused(series_toy: Toy) -> None:
    surround_with_repository(series_toy.project.root, {})
    series_toy.tree.joinpath("x").mkdir(parents=True)
    with pytest.raises(ToolError, match="no git repository of its own"):
        series_toy.refresh(series_toy.tree / "x")


def test_repository_that_source_did_not_make_is_refused(
    series_toy: Toy, tmp_path: Path
) -> None:
    surround_with_repository(tmp_path / "mine", {"precious": b"x"})
    with pytest.raises(ToolError, match="not one made by 'nox -s source'"):
        series_toy.refresh(tmp_path / "mine")
    with pytest.raises(ToolError, match="not one made by 'nox -s source'"):
        series_toy.source(tmp_path / "mine", force=True)
    assert (tmp_path / "mine/precious").read_bytes() == b"x"


def test_folder_that_does_not_exist_is_refused(series_toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="there is no folder"):
        series_toy.refresh(tmp_path / "nowhere")


@pytest.mark.parametrize("after", range(5))
def test_refresh_that_fails_half_way_changes_nothing(
    series_toy: Toy, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    git = open_tree(series_toy.tree)[0]
    git.raw("reset", "--hard", "HEAD~1")
    series_toy.write("vllm/other.py", b"changed\n")
    series_toy.write("vllm/v1/hisparse/deep/er/new.py", b"")
    series_toy.commit(message("0510", "attention: more"))
    before = series_toy.snapshot()
    real = atomic._put
    calls = []

    def flaky(path: Path, content: bytes, staging: Path) -> None:
        calls.append(path)
        if len(calls) > after:
            raise OSError(28, "No space left on device")
        real(path, content, staging)

    monkeypatch.setattr(atomic, "_put", flaky)
    with pytest.raises(OSError):
        series_toy.refresh()
    assert series_toy.snapshot() == before
    monkeypatch.undo()
    os.environ["HISPARSE_CACHE"] = str(series_toy.folder / "cache")
    assert len(series_toy.refresh()) == 8


# Source refuses to overwrite work


def work(toy: Toy, kind: str) -> None:
    """Leave some work in the tree."""
    git = open_tree(toy.tree)[0]
    toy.write("vllm/other.py", b"changed\n")
    if kind == "commit":
        toy.commit(message("0510", "attention: more"))
    elif kind == "stash":
        git.raw("stash", "--quiet")
    elif kind == "branch":
        git.raw("checkout", "-q", "-b", "mine")
        toy.commit(message("0510", "attention: more"))
        git.raw("checkout", "-q", "series")
    elif kind == "new file":
        git.raw("checkout", "-q", "--", ".")
        toy.write("vllm/new.py", b"")


@pytest.mark.parametrize("kind", ["change", "new file", "commit", "stash", "branch"])
def test_tree_with_work_in_it_is_not_overwritten(series_toy: Toy, kind: str) -> None:
    series_toy.source(force=True)
    work(series_toy, kind)
    head = open_tree(series_toy.tree)[0].text("rev-parse", "HEAD")
    with pytest.raises(ToolError, match="has work in it"):
        series_toy.source()
    assert open_tree(series_toy.tree)[0].text("rev-parse", "HEAD") == head
    git = series_toy.source(force=True)
    assert git.text("status", "--porcelain") == ""
    assert git.text("for-each-ref", "refs/stash", "refs/heads/mine") == ""


def test_tree_without_work_is_replaced(series_toy: Toy) -> None:
    series_toy.source()
    series_toy.source()
    assert [p.name for p in series_toy.tree.parent.iterdir()] == ["source"]


def test_exported_work_does_not_keep_a_tree_from_being_replaced(toy: Toy) -> None:
    toy.with_series()
    toy.source()


def test_folder_with_other_files_is_not_replaced(
    series_toy: Toy, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/precious").write_bytes(b"x")
    with pytest.raises(ToolError, match="no git repository of its own"):
        series_toy.source(tmp_path / "home", force=True)
    assert (tmp_path / "home/precious").read_bytes() == b"x"


def test_tree_inside_another_repository_is_its_own(series_toy: Toy) -> None:
    surround_with_repository(series_toy.project.root, series_toy.files)
    git = series_toy.source(force=True)
    assert b"hook()" in (series_toy.tree / "vllm/engine.py").read_bytes()
    assert git.text("rev-parse", "--show-toplevel") == str(series_toy.tree)
    assert series_toy.refresh() == []


def test_source_that_fails_half_way_keeps_the_old_tree(
    series_toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hisparse_tools import tree

    series_toy.source(force=True)

    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tree, "write_state", fail)
    with pytest.raises(KeyboardInterrupt):
        series_toy.source()
    assert [p.name for p in series_toy.tree.parent.iterdir()] == ["source"]
    monkeypatch.undo()
    assert open_tree(series_toy.tree)[0].text("status", "--porcelain") == ""


# Edits in place


def test_edit_in_place_is_recorded(series_toy: Toy) -> None:
    old = read_pins(series_toy.project.pins_file).tree
    pages = series_toy.project.overlay / "v1/hisparse/pages.py"
    pages.write_bytes(b"PAGES = 2\n")
    with pytest.raises(ToolError, match="the patched source has tree"):
        series_toy.source(force=True)
    assert series_toy.refresh_in_place() == ["upstream.toml"]
    assert read_pins(series_toy.project.pins_file).tree != old
    assert (
        members(series_toy.build().path)["vllm/v1/hisparse/pages.py"] == b"PAGES = 2\n"
    )


def test_edit_in_place_does_not_bless_an_edited_patch(series_toy: Toy) -> None:
    series_toy.replace_in_patch("0310", "+hook()", "+hook(1)")
    before = series_toy.snapshot()
    with pytest.raises(ToolError, match="is not what its commit exports to"):
        series_toy.refresh_in_place()
    assert series_toy.snapshot() == before
