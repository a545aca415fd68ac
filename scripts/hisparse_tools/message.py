# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Messages of patches: subject, sections and trailers."""

from __future__ import annotations

import re
from dataclasses import dataclass

AREAS: dict[str, tuple[str, ...]] = {
    "00": ("build", "platform"),
    "02": ("config",),
    "03": ("core", "scheduler"),
    "04": ("worker", "runner"),
    "05": ("attention",),
    "06": ("connectors",),
    "07": ("metrics", "docs"),
}
SECTIONS = ("Why", "Seam", "Alternatives", "Off-state")
REQUIRED_TRAILERS = ("Patch", "Tests", "Upstream", "Remove-when", "Signed-off-by")
KNOWN_TRAILERS = (*REQUIRED_TRAILERS, "Overlay", "Size-reason")

_TRAILER = re.compile(r"([A-Za-z][A-Za-z-]*): (\S.*)")
_SUBJECT = re.compile(r"([a-z]+): (\S.*)")


@dataclass(frozen=True)
class Message:
    """A commit message taken apart.

    Attributes:
        subject: First line.
        body: Text between subject and trailers.
        trailers: Pairs of key and value, in order.
    """

    subject: str
    body: str
    trailers: tuple[tuple[str, str], ...]

    def values(self, key: str) -> list[str]:
        """Return the values of all trailers with this key, in order."""
        return [value for name, value in self.trailers if name == key]

    def value(self, key: str) -> str | None:
        """Return the value of the first trailer with this key."""
        values = self.values(key)
        return values[0] if values else None

    @property
    def overlay(self) -> list[str]:
        """Overlay files that the patch brings, as paths under the source's top."""
        return [f"vllm/{path}" for path in self.values("Overlay")]

    @property
    def area(self) -> str | None:
        """The word in front of the subject's colon."""
        match = _SUBJECT.fullmatch(self.subject)
        return match[1] if match else None

    def section(self, name: str) -> str | None:
        """Return the text of a ``Name:`` section of the body, or None."""
        names = "|".join(SECTIONS)
        match = re.search(
            rf"(?ms)^{name}:[ \n](.*?)(?=^(?:{names}):|\Z)", self.body + "\n"
        )
        return match[1].strip() if match else None

    def text(self) -> str:
        """Return the whole message as one text, ending in a newline."""
        parts = [self.subject]
        if self.body:
            parts.append(self.body)
        if self.trailers:
            parts.append("\n".join(f"{key}: {value}" for key, value in self.trailers))
        return "\n\n".join(parts) + "\n"


def parse_message(text: str) -> Message:
    """Take a commit message apart.

    Trailers are the last paragraph, if every line of it reads ``Key: value``; a
    line that starts with a space continues the one before it.
    """
    text = text.strip("\n")
    subject, _, rest = text.partition("\n")
    paragraphs = rest.strip("\n")
    head, gap, last = paragraphs.rpartition("\n\n")
    if not gap:
        head, last = "", paragraphs
    trailers: list[tuple[str, str]] = []
    for line in last.split("\n"):
        match = _TRAILER.fullmatch(line)
        if match:
            trailers.append((match[1], match[2]))
        elif line.startswith(" ") and trailers:
            key, value = trailers[-1]
            trailers[-1] = (key, f"{value}\n{line}")
        else:
            return Message(subject, paragraphs, ())
    return Message(subject, head, tuple(trailers))


def with_overlay(message: Message, paths: list[str]) -> Message:
    """Return the message with exactly these ``Overlay:`` trailers.

    Args:
        message: The message; its own ``Overlay:`` trailers are dropped.
        paths: Overlay files as paths under the source's top (``vllm/...``).
    """
    kept = [pair for pair in message.trailers if pair[0] != "Overlay"]
    ours = [("Overlay", path.removeprefix("vllm/")) for path in sorted(paths)]
    place = 0
    for index, (key, _) in enumerate(kept):
        if key in ("Patch", "Tests"):
            place = index + 1
    return Message(message.subject, message.body, (*kept[:place], *ours, *kept[place:]))


def slug(subject: str) -> str:
    """Return the subject as a file name part: ``a: b c`` gives ``a-b-c``."""
    return re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")


def patch_name(message: Message) -> str:
    """Return the file name of a patch: id, then the subject's slug."""
    return f"{message.value('Patch')}-{slug(message.subject)}.patch"


def area_prefixes(word: str | None) -> list[str]:
    """Return the first two digits of ids in an area."""
    return [digits for digits, words in AREAS.items() if word in words]


def next_free_id(word: str | None, taken: set[str]) -> str | None:
    """Propose a patch id for an area: the next step of ten that is free."""
    for digits in area_prefixes(word):
        used = [int(number) for number in taken if number.startswith(digits)]
        number = (max(used) // 10 + 1) * 10 if used else int(digits) * 100 + 10
        if f"{number:04d}".startswith(digits):
            return f"{number:04d}"
    return None
