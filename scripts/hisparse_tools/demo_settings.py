# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The demo's flags, checked."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import NoReturn, TypeVar

from .errors import ToolError
from .pins import Device

MAX_TURNS = 20
MAX_ANSWER_TOKENS = 512
MAX_CONTEXT = 32768
HOST = "127.0.0.1"
# Conversations that are held at the same time.
CONVERSATIONS = 5

# The model's tokens are bytes, so the first is longer than one page of 64 tokens: the
# second turn already finds a page in the prefix cache.
_MESSAGES = (
    "Hello! Please tell me, in a sentence, which rows sparse attention reads.",
    "And where do the other rows live meanwhile?",
    "What happens if one of them is needed again?",
    "Thank you. Is there anything else I should know?",
)
_DEFAULT_TURNS = 3
_DEFAULT_MAX_TOKENS = 48

_Choice = TypeVar("_Choice", bound=Enum)


class HiSparse(str, Enum):
    """Which servers to start."""

    OFF = "off"
    ON = "on"
    COMPARE = "compare"


@dataclass(frozen=True)
class DemoSettings:
    """What to say, and how to serve it.

    Attributes:
        device: What the wheel runs on.
        messages: The user's messages, one per turn.
        max_tokens: Most tokens of one answer.
        port: Port to serve on; 0 for any that is free.
        keep: Whether to keep the model and the servers' logs.
        hisparse: Which servers to start.
        out: Folder for the picture.
    """

    device: Device
    messages: tuple[str, ...]
    max_tokens: int
    port: int
    keep: bool
    hisparse: HiSparse = HiSparse.COMPARE
    out: str = "build/demo"

    def conversations(self) -> list[tuple[str, ...]]:
        """Return the user's messages of each conversation.

        All but the first begin with a number, so that they share no page.
        """
        first, *later = self.messages
        return [
            (f"{number}. {first}" if number > 1 else first, *later)
            for number in range(1, CONVERSATIONS + 1)
        ]

    def runs(self) -> tuple[bool, ...]:
        """Return whether HiSparse is on, for each server to start."""
        if self.device is Device.CUDA or self.hisparse is HiSparse.OFF:
            return (False,)
        return (True,) if self.hisparse is HiSparse.ON else (False, True)

    def context(self) -> int:
        """Return the most tokens that a conversation can come to."""
        longest = self.conversations()[-1]
        said = sum(len(message.encode()) for message in longest)
        # Each message has two tokens of its own, and the whole begins with two.
        marks = 2 + 4 * len(self.messages)
        return said + marks + self.max_tokens * len(self.messages)

    def to_json(self) -> str:
        """Return the settings as text for `from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> DemoSettings:
        """Return the settings that `to_json` wrote."""
        fields = json.loads(text)
        fields["device"] = Device(fields["device"])
        fields["messages"] = tuple(fields["messages"])
        fields["hisparse"] = HiSparse(fields["hisparse"])
        return DemoSettings(**fields)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong as all of the project's tools do."""

    def error(self, message: str) -> NoReturn:
        raise ToolError(message, "./run demo -- --help lists the options")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nox -s demo --",
        description="Build, make a small model, serve it without and with HiSparse, "
        "and hold the same conversations with both servers.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device",
        metavar="|".join(choice.value for choice in Device),
        help="what to serve on; CUDA if this machine has it, else cpu",
    )
    parser.add_argument(
        "--hisparse",
        metavar="|".join(choice.value for choice in HiSparse),
        default=HiSparse.COMPARE.value,
        help="serve without HiSparse, with it, or first without and then with it, "
        "and compare (default)",
    )
    parser.add_argument(
        "--turns",
        metavar="N",
        help=f"turns of the conversation, 1 to {MAX_TURNS} (default {_DEFAULT_TURNS}, "
        "or as many as there are prompts)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        default=[],
        help="what to say; give it again for the next turn",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        default=str(_DEFAULT_MAX_TOKENS),
        help=f"most tokens of one answer, 1 to {MAX_ANSWER_TOKENS} "
        f"(default {_DEFAULT_MAX_TOKENS})",
    )
    parser.add_argument(
        "--port",
        metavar="N",
        default="0",
        help="port to serve on (default: a free one)",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the model and the servers' logs"
    )
    return parser


def parse_settings(
    argv: Sequence[str], detect: Device, out: str = "build/demo"
) -> DemoSettings:
    """Read the flags.

    Args:
        argv: The arguments.
        detect: The device to use when no flag names one.
        out: Folder for the picture.

    Raises:
        ToolError: If a value is not allowed.
    """
    args = _parser().parse_args(argv)
    turns = _DEFAULT_TURNS if not args.prompt else len(args.prompt)
    if args.turns is not None:
        turns = _number("--turns", args.turns, 1, MAX_TURNS)
    settings = DemoSettings(
        device=_choice("--device", args.device or detect.value, Device),
        messages=_messages(args.prompt, turns),
        max_tokens=_number("--max-tokens", args.max_tokens, 1, MAX_ANSWER_TOKENS),
        port=_number("--port", args.port, 0, 65535),
        keep=args.keep,
        hisparse=_choice("--hisparse", args.hisparse, HiSparse),
        out=out,
    )
    if settings.device is Device.CUDA and settings.hisparse is HiSparse.ON:
        raise ToolError(
            "--hisparse is 'on', but no GPU has run HiSparse yet",
            "add --device cpu, or leave --hisparse out",
        )
    if settings.context() > MAX_CONTEXT:
        raise ToolError(
            f"a conversation may come to {settings.context()} tokens (a byte is a "
            f"token); the demo's model has a context of at most {MAX_CONTEXT}",
            "shorten --prompt, or lower --turns or --max-tokens",
        )
    return settings


def _choice(name: str, text: str, choices: type[_Choice]) -> _Choice:
    allowed = [choice.value for choice in choices]
    if text in allowed:
        return choices(text)
    raise ToolError(
        f"{name} is {text!r}; allowed are {', '.join(allowed)}",
        f"give {name} one of these, or leave it out",
    )


def _number(name: str, text: str, low: int, high: int) -> int:
    if text.strip().isdecimal() and low <= int(text) <= high:
        return int(text)
    raise ToolError(
        f"{name} is {text!r}; allowed is a whole number from {low} to {high}",
        f"give {name} such a number, or leave it out",
    )


def _messages(prompts: list[str], turns: int) -> tuple[str, ...]:
    if len(prompts) > turns:
        raise ToolError(
            f"--prompt is given {len(prompts)} times, but --turns is {turns}",
            f"raise --turns to {len(prompts)}, or leave it out",
        )
    for prompt in prompts:
        if not prompt.strip():
            raise ToolError("--prompt is empty", "say something, or leave it out")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ToolError(
                f"--prompt is not valid text: {error.reason}",
                "give it as UTF-8, in a terminal whose encoding is UTF-8",
            ) from error
    later = _MESSAGES[1:]
    messages = list(prompts) or [_MESSAGES[0]]
    while len(messages) < turns:
        messages.append(later[(len(messages) - 1) % len(later)])
    return tuple(messages)


def free_port(wanted: int) -> int:
    """Return a port of this machine that can be served on.

    Args:
        wanted: The port; 0 for any.

    Raises:
        ToolError: If the wanted port cannot be had.
    """
    with socket.socket() as probe:
        # As the server will: a port that was closed a moment ago can be had again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted))
        except OSError as error:
            raise ToolError(
                f"--port is {wanted}, which cannot be served on: {error.strerror}",
                "choose another port, or leave --port out",
            ) from error
        return probe.getsockname()[1]
