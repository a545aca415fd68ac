# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Several conversations with one server at the same time; the first is shown."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from hisparse_tools.errors import ToolError
from hisparse_tools.progress import say
from hisparse_tools.server import Server

from .screen import Waiting, printable
from .serving import MODEL_NAME

ANSWER_TIMEOUT_S = 900
_POLL_S = 0.2


@dataclass(frozen=True)
class Turn:
    """One answer; all but `seconds` is by the server.

    Attributes:
        text: The answer.
        tokens: Its token ids.
        logprobs: The log-probability of each.
        prompt_tokens: Tokens of the conversation so far.
        cached_tokens: Those of them that the prefix cache had.
        seconds: From the question to the last token, measured here.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    seconds: float


@dataclass(frozen=True)
class _Event:
    """What a conversation's thread tells the one that prints."""

    conversation: int
    said: str = ""
    piece: str = ""
    turn: Turn | None = None
    error: Exception | None = None


class _Conversation(threading.Thread):
    """Holds one conversation over HTTP, and tells what happens in it."""

    def __init__(
        self,
        number: int,
        messages: Sequence[str],
        url: str,
        max_tokens: int,
        events: queue.SimpleQueue[_Event],
    ) -> None:
        # Not waited for when the demo is interrupted: the server's end ends them.
        super().__init__(daemon=True)
        self._number, self._to_say, self._events = number, messages, events
        self._max_tokens = max_tokens
        self._messages: list[dict[str, str]] = []
        self._client = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            timeout=ANSWER_TIMEOUT_S,
            max_retries=0,
            # Not through a proxy: the server is on this machine.
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )

    def run(self) -> None:
        """Say everything, each message after the answer to the last."""
        try:
            for message in self._to_say:
                self._events.put(_Event(self._number, said=message))
                turn = self._turn(message)
                self._events.put(_Event(self._number, turn=turn))
        except Exception as error:
            self._events.put(_Event(self._number, error=error))

    def _turn(self, message: str) -> Turn:
        self._messages.append({"role": "user", "content": message})
        start = time.monotonic()
        text, usage = "", None
        tokens: list[int] = []
        logprobs: list[float] = []
        for chunk in self._stream():
            usage = chunk.usage or usage
            for choice in chunk.choices:
                piece = choice.delta.content or ""
                self._events.put(_Event(self._number, piece=piece))
                text += piece
                tokens += getattr(choice, "token_ids", None) or ()
                if choice.logprobs is not None:
                    logprobs += [t.logprob for t in choice.logprobs.content or ()]
        seconds = time.monotonic() - start
        if usage is None:
            raise RuntimeError("it ended without a count of its tokens")
        if not usage.completion_tokens == len(tokens) == len(logprobs):
            raise RuntimeError(
                f"it counts {usage.completion_tokens} tokens, but has {len(tokens)} "
                f"tokens and {len(logprobs)} log-probabilities"
            )
        self._messages.append({"role": "assistant", "content": text})
        details = usage.prompt_tokens_details
        cached = details.cached_tokens or 0 if details is not None else 0
        return Turn(
            text, tuple(tokens), tuple(logprobs), usage.prompt_tokens, cached, seconds
        )

    def _stream(self) -> Iterator[Any]:
        yield from self._client.chat.completions.create(
            model=MODEL_NAME,
            messages=self._messages,  # type: ignore[arg-type]
            max_tokens=self._max_tokens,
            temperature=0,
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )


class Talk:
    """Holds the conversations and prints the first as it goes."""

    def __init__(
        self,
        server: Server,
        url: str,
        conversations: Sequence[Sequence[str]],
        max_tokens: int,
    ) -> None:
        self._server, self._url = server, url
        self._conversations, self._max_tokens = conversations, max_tokens
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._turns: list[list[Turn]] = [[] for _ in conversations]

    def hold(self) -> list[list[Turn]]:
        """Return the turns of each conversation.

        Raises:
            ToolError: If the server ends or answers with an error.
        """
        start = time.monotonic()
        for number, messages in enumerate(self._conversations):
            _Conversation(
                number, messages, self._url, self._max_tokens, self._events
            ).start()
        self._show_first()
        total = sum(map(len, self._conversations))
        with Waiting() as waiting:
            while (done := sum(map(len, self._turns))) < total:
                waited_s = time.monotonic() - start
                waiting.show(waited_s, f"{done} of {total} turns answered")
                self._next(wait_s=_POLL_S)
        return self._turns

    def _show_first(self) -> None:
        while len(self._turns[0]) < len(self._conversations[0]):
            event = self._next(wait_s=ANSWER_TIMEOUT_S)
            if event is None or event.conversation:
                continue
            if event.said:
                say(f"\nuser>  {printable(event.said)}")
                print("model> ", end="", flush=True)
            print(printable(event.piece), end="", flush=True)
            if event.turn is not None:
                say()
        say()

    def _next(self, wait_s: float) -> _Event | None:
        """Return what happens next, noting turns; None if nothing does.

        Raises:
            ToolError: If it is an error.
        """
        try:
            event = self._events.get(timeout=wait_s)
        except queue.Empty:
            return None
        if event.turn is not None:
            self._turns[event.conversation].append(event.turn)
        if event.error is not None:
            say()
            raise self._explained(event.error) from event.error
        return event

    def _explained(self, error: Exception) -> ToolError:
        """A server whose engine died answers with an error first, and then ends."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            self._server.check("answering")
            time.sleep(0.1)
        return self._server.error(
            f"an answer broke off: {type(error).__name__}: {error}"
        )
