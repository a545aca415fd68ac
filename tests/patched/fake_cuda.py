# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Stands in for what torch needs a GPU for: streams, events, pinned memory."""

import contextlib
from collections.abc import Iterator
from itertools import chain, count

import pytest
import torch


class FakeCuda:
    """Streams and events that log what is asked of them, in place of torch's.

    Attributes:
        log: What was asked, in order.
        ready: Numbers of the events that have come.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list = []
        self.ready: set[int] = set()
        log, ready, numbers = self.log, self.ready, count()
        sides = chain(["side", "other side"], (f"side {n}" for n in count(3)))

        class Stream:
            def __init__(self, device=None, name=None):
                self.name = name or next(sides)

            def wait_stream(self, other):
                log.append((self.name, "waits for", other.name))

            def wait_event(self, event):
                log.append((self.name, "waits for", event.number))

            def synchronize(self):
                log.append((self.name, "synchronizes"))

        class Event:
            def __init__(self):
                self.number = next(numbers)

            def record(self, stream):
                log.append((stream.name, "records", self.number))

            def query(self):
                return self.number in ready

        @contextlib.contextmanager
        def stream(which: Stream) -> Iterator[None]:
            log.append((which.name, "is entered"))
            yield
            log.append((which.name, "is left"))

        compute = Stream(name="compute")
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: compute)


def take_meta_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors without values say that a GPU has them; what is pinned is marked."""

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device.type == "cpu"
        pinned = tensor.clone()
        pinned.is_marked_as_pinned = True  # type: ignore[attr-defined]
        return pinned

    is_cuda = property(lambda tensor: tensor.device.type == "meta")
    monkeypatch.setattr(torch.Tensor, "is_cuda", is_cuda, raising=False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory, raising=False)
