# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A patch applies exactly where it was made for, or the build stops."""

from __future__ import annotations

import pytest

from hisparse_tools.errors import ToolError
from toy import Toy, make_sdist, message


def rebase_source(toy: Toy, name: str, content: bytes) -> None:
    """Change a file of the release under the series, and pin the result."""
    toy.files[name] = content
    make_sdist(toy.sdist, toy.files)
    text = toy.project.pins_file.read_text()
    from hisparse_tools.atomic import sha256_of
    from hisparse_tools.git import init_repository
    from hisparse_tools.pins import read_pins
    from hisparse_tools.sdist import import_sdist

    old = read_pins(toy.project.pins_file)
    tree = import_sdist(init_repository(toy.folder / "again.git"), toy.sdist).tree
    text = text.replace(old.sdist.sha256, sha256_of(toy.sdist))
    toy.project.pins_file.write_text(text.replace(old.base_tree, tree))


def test_patch_whose_context_changed_is_refused(series_toy: Toy) -> None:
    content = series_toy.files["vllm/engine.py"].replace(b"line 29\n", b"line 29!\n")
    rebase_source(series_toy, "vllm/engine.py", content)
    with pytest.raises(ToolError, match="0310-.* does not apply: .*vllm/engine.py"):
        series_toy.build()


def test_patch_whose_file_is_gone_is_refused(series_toy: Toy) -> None:
    series_toy.files.pop("vllm/engine.py")
    rebase_source(series_toy, "vllm/new.py", b"")
    with pytest.raises(ToolError, match="0310-.* does not apply"):
        series_toy.build()


def test_patch_that_applies_with_an_offset_is_refused(series_toy: Toy) -> None:
    content = b"a new first line\n" + series_toy.files["vllm/engine.py"]
    rebase_source(series_toy, "vllm/engine.py", content)
    with pytest.raises(
        ToolError, match=r"0310-.* applies only elsewhere: hunk 1 at line 29 \(offset 1"
    ):
        series_toy.build()


def test_patch_for_another_version_of_the_file_is_refused(series_toy: Toy) -> None:
    # The hunk still fits, line numbers included; the file changed somewhere else.
    content = series_toy.files["vllm/engine.py"].replace(b"line 55\n", b"line 55!\n")
    rebase_source(series_toy, "vllm/engine.py", content)
    with pytest.raises(ToolError, match="0310-.* is not what its commit exports to"):
        series_toy.build()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Why: a test.", "Why: a test. "),
        ("+hook()", "+hook2()"),
        ("line 33", "line 33 "),
        ("Subject: core:", "Subject:  core:"),
        ("\n\ndiff --git", "\n---\n\ndiff --git"),
        ("Date: ", "Date:  "),
    ],
)
def test_patch_edited_by_hand_is_refused(series_toy: Toy, old: str, new: str) -> None:
    series_toy.replace_in_patch("0310", old, new)
    with pytest.raises(ToolError, match="patches/0310-"):
        series_toy.build()


def test_text_after_the_patch_is_refused(series_toy: Toy) -> None:
    path = series_toy.patch("0310")
    path.write_bytes(path.read_bytes() + b"-- \n2.39\n")
    with pytest.raises(ToolError, match="patches/0310-"):
        series_toy.build()


def test_patch_with_its_line_ends_converted_is_refused(series_toy: Toy) -> None:
    path = series_toy.patch("0310")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(ToolError, match="0310-|claim"):
        series_toy.build()


def test_patch_without_a_mail_head_is_refused(series_toy: Toy) -> None:
    path = series_toy.patch("0310")
    text = path.read_text()
    path.write_text(text[text.index("diff --git") :])
    with pytest.raises(ToolError, match="0310-.* has no "):
        series_toy.build()


def test_empty_patch_file_is_refused(series_toy: Toy) -> None:
    series_toy.patch("0310").write_bytes(b"")
    with pytest.raises(ToolError, match="0310-"):
        series_toy.build()


def test_patches_in_another_order_are_applied_to_what_they_were_made_for(
    toy: Toy,
) -> None:
    toy.source()
    toy.edit("vllm/engine.py", b"line 30\n", b"line thirty\n")
    toy.commit(message())
    toy.edit("vllm/engine.py", b"line thirty\n", b"line XXX\n")
    toy.commit(message("0320", "core: add second hook"))
    toy.refresh()
    order = toy.project.patches / "series"
    order.write_text("\n".join(reversed(order.read_text().split())) + "\n")
    with pytest.raises(ToolError, match="0320-.* does not apply"):
        toy.build()


def test_patch_that_a_repack_cannot_carry_is_refused(series_toy: Toy) -> None:
    path = series_toy.patch("0310")
    extra = b"""\
diff --git a/csrc/kernel.cu b/csrc/kernel.cu
index 8ee35b4..8a6a4ee 100644
--- a/csrc/kernel.cu
+++ b/csrc/kernel.cu
@@ -1 +1 @@
-// native
+// changed
"""
    path.write_bytes(path.read_bytes() + extra)
    with pytest.raises(
        ToolError, match="csrc/kernel.cu, which a repacked wheel cannot"
    ):
        series_toy.build()


def test_patch_that_adds_a_body_itself_is_refused(series_toy: Toy) -> None:
    path = series_toy.patch("0310")
    extra = b"""\
diff --git a/vllm/body.py b/vllm/body.py
new file mode 100644
--- /dev/null
+++ b/vllm/body.py
@@ -0,0 +1 @@
+BODY = 1
"""
    path.write_bytes(path.read_bytes() + extra)
    with pytest.raises(ToolError, match="vllm/body.py, which belongs in the overlay"):
        series_toy.build()


def claim(toy: Toy, path: str) -> None:
    """Let the second patch bring one more overlay file."""
    toy.replace_in_patch(
        "0410",
        "Overlay: v1/hisparse/README.md\n",
        f"Overlay: {path}\nOverlay: v1/hisparse/README.md\n",
    )
    file = toy.project.overlay / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"mine\n")


@pytest.mark.parametrize(
    ("path", "hit"),
    [
        ("other.py", "vllm/other.py"),
        ("other.py/inside.py", "vllm/other.py"),
        ("core", "vllm/core"),
    ],
)
def test_overlay_file_that_exists_upstream_is_refused(
    series_toy: Toy, path: str, hit: str
) -> None:
    claim(series_toy, path)
    with pytest.raises(ToolError, match=f"would replace {hit}, which exists upstream"):
        series_toy.build()


def test_overlay_file_without_an_owner_is_refused(series_toy: Toy) -> None:
    (series_toy.project.overlay / "v1/hisparse/new.py").write_bytes(b"")
    with pytest.raises(ToolError, match="no patch claims overlay file v1/hisparse/new"):
        series_toy.build()


def test_overlay_file_with_two_owners_is_refused(series_toy: Toy) -> None:
    series_toy.replace_in_patch(
        "0310",
        "Tests: tests/unit\n",
        "Tests: tests/unit\nOverlay: v1/hisparse/pages.py\n",
    )
    with pytest.raises(ToolError, match="pages.py is claimed by 0310-.* and 0410-"):
        series_toy.build()


def test_overlay_file_that_is_missing_is_refused(series_toy: Toy) -> None:
    (series_toy.project.overlay / "v1/hisparse/pages.py").unlink()
    with pytest.raises(ToolError, match="0410-.* claims overlay file .*pages.py"):
        series_toy.build()


def test_overlay_link_is_refused(series_toy: Toy) -> None:
    (series_toy.project.overlay / "v1/link.py").symlink_to("hisparse/pages.py")
    with pytest.raises(ToolError, match="is a symbolic link"):
        series_toy.build()


def test_caches_in_the_overlay_are_ignored(series_toy: Toy) -> None:
    want = series_toy.build().sha256
    cache = series_toy.project.overlay / "v1/hisparse/__pycache__"
    cache.mkdir()
    (cache / "pages.cpython-311.pyc").write_bytes(b"x")
    assert series_toy.build().sha256 == want


def test_patch_that_is_not_listed_is_refused(series_toy: Toy) -> None:
    order = series_toy.project.patches / "series"
    order.write_text(order.read_text().splitlines()[1] + "\n")
    with pytest.raises(
        ToolError, match="patches/0310-.* is not named in patches/series"
    ):
        series_toy.build()


def test_listed_patch_that_is_missing_is_refused(series_toy: Toy) -> None:
    series_toy.patch("0310").unlink()
    with pytest.raises(ToolError, match="names 0310-.*, which does not exist"):
        series_toy.build()


def test_patch_listed_twice_is_refused(series_toy: Toy) -> None:
    order = series_toy.project.patches / "series"
    order.write_text(order.read_text() + order.read_text())
    with pytest.raises(ToolError, match="more than once"):
        series_toy.build()


@pytest.mark.parametrize("name", ["../evil.patch", "310-x.patch", "0310-x.diff"])
def test_series_line_that_is_no_patch_name_is_refused(toy: Toy, name: str) -> None:
    (toy.project.patches / "series").write_text(name + "\n")
    with pytest.raises(ToolError, match="is not NNNN-words.patch"):
        toy.build()


def test_archive_that_reaches_outside_is_refused(toy: Toy) -> None:
    with pytest.raises(ToolError, match="forbidden name"):
        rebase_source(toy, "../../outside.py", b"x")


def test_archive_cut_short_is_refused(toy: Toy) -> None:
    from hisparse_tools.git import init_repository
    from hisparse_tools.sdist import import_sdist

    toy.sdist.write_bytes(toy.sdist.read_bytes()[:200])
    with pytest.raises(ToolError, match="is no readable source archive"):
        import_sdist(init_repository(toy.folder / "x.git"), toy.sdist)
