# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Messages of patches."""

from __future__ import annotations

import pytest

from hisparse_tools.message import (
    next_free_id,
    parse_message,
    patch_name,
    slug,
    with_overlay,
)

TEXT = """\
core: add a hook

Why: first
paragraph.

More of it.

Seam: second.

Patch: 0310
Tests: tests/a.py
Upstream: no
 but soon
"""


def test_message_survives_parsing() -> None:
    assert parse_message(TEXT).text() == TEXT


def test_sections_end_where_the_next_begins() -> None:
    message = parse_message(TEXT)
    assert message.section("Why") == "first\nparagraph.\n\nMore of it."
    assert message.section("Seam") == "second."
    assert message.section("Off-state") is None


def test_continuation_belongs_to_its_trailer() -> None:
    assert parse_message(TEXT).value("Upstream") == "no\n but soon"


def test_last_paragraph_with_other_text_is_no_trailer() -> None:
    message = parse_message("core: x\n\nPatch: 0310\nand more\n")
    assert message.trailers == ()
    assert message.body == "Patch: 0310\nand more"


def test_subject_alone_is_a_message() -> None:
    assert parse_message("core: x\n").text() == "core: x\n"


def test_overlay_trailers_are_replaced_sorted_behind_tests() -> None:
    message = with_overlay(parse_message(TEXT), ["vllm/b.py", "vllm/a.py"])
    again = with_overlay(message, ["vllm/b.py", "vllm/a.py"])
    assert [key for key, _ in message.trailers] == [
        "Patch",
        "Tests",
        "Overlay",
        "Overlay",
        "Upstream",
    ]
    assert message.values("Overlay") == ["a.py", "b.py"]
    assert message.overlay == ["vllm/a.py", "vllm/b.py"]
    assert again == message
    assert with_overlay(message, []) == parse_message(TEXT)


def test_file_name_is_id_and_subject() -> None:
    assert patch_name(parse_message(TEXT)) == "0310-core-add-a-hook.patch"
    assert slug("core: Add `x_y`, (now)") == "core-add-x-y-now"


@pytest.mark.parametrize(
    ("word", "taken", "free"),
    [
        ("core", set(), "0310"),
        ("scheduler", {"0310", "0325"}, "0330"),
        ("build", set(), "0010"),
        ("build", {"0090"}, None),
        ("core", {"0390"}, None),
        ("nonsense", set(), None),
        (None, set(), None),
    ],
)
def test_next_free_id_is_the_next_ten(
    word: str | None, taken: set[str], free: str | None
) -> None:
    assert next_free_id(word, taken) == free
