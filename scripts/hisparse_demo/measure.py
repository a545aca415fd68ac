# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What a server says about its load: sampled while it works, and counted at the end."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hisparse_tools.served_by import metric_labels, metric_totals

from .talk import Turn

PERIOD_S = 0.2

_ITERATION = re.compile(
    r"Iteration\(\d+\): \d+ context requests, (\d+) context tokens, "
    r"\d+ generation requests, (\d+) generation tokens"
)


@dataclass(frozen=True)
class Sample:
    """The state of a server at one time.

    Attributes:
        seconds: Since sampling began.
        running: Requests in the batch.
        waiting: Requests that wait for room.
        preemptions: So far.
        device: Pages of running requests that are on the device only.
        both: Those that are on the device and on the host.
        host: Those whose latents are on the host only.
    """

    seconds: float
    running: int
    waiting: int
    preemptions: int
    device: int
    both: int
    host: int

    @staticmethod
    def read(metrics: str, seconds: float) -> Sample:
        """Read what ``/metrics`` answered.

        Without HiSparse every page in use is on the device only.
        """
        now = metric_totals(metrics)
        names = ("pages_device", "pages_both", "pages_host")
        pages = [round(now[f"vllm:hisparse_{name}"]) for name in names]
        if "vllm:hisparse_pages_device" not in metrics:
            labels = metric_labels(metrics, "vllm:cache_config_info")
            # One block is vLLM's own.
            blocks = int(labels.get("num_gpu_blocks", "1")) - 1
            pages[0] = round(now["vllm:kv_cache_usage_perc"] * blocks)
        return Sample(
            seconds,
            round(now["vllm:num_requests_running"]),
            round(now["vllm:num_requests_waiting"]),
            round(now["vllm:num_preemptions_total"]),
            *pages,
        )


class Monitor:
    """Samples a server from a thread of its own, as a context manager."""

    def __init__(self, get: Callable[[], str | None]) -> None:
        """Sample nothing yet.

        Args:
            get: Returns what ``/metrics`` answers, None where it does not.
        """
        self.samples: list[Sample] = []
        self._get = get
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        start = time.monotonic()
        while not self._stop.is_set():
            seconds = time.monotonic() - start
            metrics = self._get()
            if metrics is not None:
                self.samples.append(Sample.read(metrics, seconds))
            self._stop.wait(PERIOD_S)


@dataclass(frozen=True)
class Load:
    """What one server did for the conversations, from its metrics and log.

    Attributes:
        preemptions: Times that a running request lost its memory.
        again_after_preemption: Tokens computed again after that.
        again_of_history: Tokens of earlier turns computed again, as the prefix cache
            had lost them or had never had them: it keeps whole pages only.
        prompt_cached: Tokens of prompts that the prefix cache had.
        most_running: Most requests in the batch, sampled.
        mean_running: Their mean while any request ran or waited, sampled.
        hits: Selected rows found in a hot buffer.
        misses: Selected rows fetched from the host.
        to_host: Bytes copied to the host.
        from_host: Bytes fetched and restored from it.
        seconds: How long all of it took.
    """

    preemptions: int
    again_after_preemption: int
    again_of_history: int
    prompt_cached: int
    most_running: int
    mean_running: float
    hits: int
    misses: int
    to_host: int
    from_host: int
    seconds: float

    @property
    def recomputed(self) -> int:
        """Tokens computed more than once."""
        return self.again_after_preemption + self.again_of_history

    @property
    def hit_rate(self) -> float | None:
        """Share of the rows off the device that a hot buffer had; None of none."""
        rows = self.hits + self.misses
        return self.hits / rows if rows else None

    @staticmethod
    def read(
        metrics: str,
        log: str,
        samples: Sequence[Sample],
        conversations: Sequence[Sequence[Turn]],
    ) -> Load:
        """Read what a server says at the end.

        Args:
            metrics: What ``/metrics`` answers.
            log: The server's log.
            samples: Of the whole time.
            conversations: What was said with this server, and nothing else was.
        """
        now = {name: round(value) for name, value in metric_totals(metrics).items()}
        needed = needed_tokens(now, sum(map(len, conversations)))
        busy = [sample for sample in samples if sample.running or sample.waiting]
        return Load(
            preemptions=now.get("vllm:num_preemptions_total", 0),
            again_after_preemption=computed_tokens(log) - needed,
            again_of_history=needed - distinct_tokens(conversations),
            prompt_cached=now.get("vllm:prompt_tokens_cached_total", 0),
            most_running=max((s.running for s in busy), default=0),
            mean_running=sum(s.running for s in busy) / max(1, len(busy)),
            hits=now.get("vllm:hisparse_cache_hits_total", 0),
            misses=now.get("vllm:hisparse_cache_misses_total", 0),
            to_host=now.get("vllm:hisparse_device_to_host_bytes_total", 0),
            from_host=now.get("vllm:hisparse_host_to_device_bytes_total", 0),
            seconds=samples[-1].seconds if samples else 0.0,
        )


def capacity_pages(metrics: str) -> float:
    """Return the pages that the device holds if it holds nothing else."""
    labels = metric_labels(metrics, "vllm:cache_config_info")
    return int(labels["kv_cache_size_tokens"]) / int(labels["block_size"])


def computed_tokens(log: str) -> int:
    """Return the tokens that all steps of the engine computed, by the server's log."""
    return sum(int(prompt) + int(new) for prompt, new in _ITERATION.findall(log))


def needed_tokens(metrics: Mapping[str, int], answers: int) -> int:
    """Return the tokens to compute if no request ever loses its memory.

    A request's prompt, less what the prefix cache had when it was first scheduled;
    and its answer, less the last token, which nothing is computed from.

    Args:
        metrics: Values by name.
        answers: Answers that were given.
    """
    prompt = metrics.get("vllm:prompt_tokens_total", 0)
    cached = metrics.get("vllm:prompt_tokens_cached_total", 0)
    return prompt - cached + metrics.get("vllm:generation_tokens_total", 0) - answers


def distinct_tokens(conversations: Sequence[Sequence[Turn]]) -> int:
    """Return the tokens that conversations came to, the last of each left out.

    Each of them must be computed once: nothing is computed from the last.
    """
    ends = [turns[-1] for turns in conversations]
    return sum(end.prompt_tokens + len(end.tokens) - 1 for end in ends)
