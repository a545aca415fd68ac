# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What a running server says about itself: its log, its endpoints, its build."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from importlib.metadata import distribution

from .errors import ToolError

_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_RUNNER = re.compile(r"Using (V\d+) Model Runner")
# "Using CPU_MLA_SPARSE backend." or "Using X attention backend out of ..."
_BACKEND = re.compile(
    r"Using (?:AttentionBackendEnum\.)?(\w+)(?: attention)? backend\b"
)
_DEVICE = re.compile(r"\bdevice_config=(\w+)")


def metric_totals(text: str) -> defaultdict[str, float]:
    """Return the metrics' values by name, summed over their labels; others are 0.

    Args:
        text: What ``/metrics`` answered.
    """
    totals: defaultdict[str, float] = defaultdict(float)
    for match in _SAMPLE.finditer(text):
        totals[match["name"]] += float(match["value"])
    return totals


def metric_labels(text: str, name: str) -> dict[str, str]:
    """Return the labels of a metric's first sample; none where it is absent."""
    for match in _SAMPLE.finditer(text):
        if match["name"] == name:
            return dict(_LABEL.findall(match["labels"] or ""))
    return {}


@dataclass(frozen=True)
class Build:
    """What the installed wheel says that it contains."""

    version: str
    tree: str
    patches: int

    @staticmethod
    def installed() -> Build:
        """Return the build that is installed beside this interpreter.

        Raises:
            ToolError: If the installed vLLM was not built by this project.
        """
        text = distribution("vllm").read_text("hisparse.json")
        if text is None:
            raise ToolError(
                "the installed vLLM is not this project's: it has no hisparse.json",
                "run nox -s demo, which builds and installs its own",
            )
        identity = json.loads(text)
        return Build(identity["version"], identity["tree"], len(identity["patches"]))


@dataclass(frozen=True)
class ServedBy:
    """Facts about a server, each from the server itself.

    Attributes:
        version: What ``/version`` answers.
        runner: The model runner named in the log.
        backend: The attention backend named in the log.
        device: The device named in the log.
        residency: Where the KV rows are, by the server's metrics.
        cache: What the device's KV cache holds, by the server's metrics.
    """

    version: str
    runner: str
    backend: str
    device: str
    residency: str
    cache: str

    @staticmethod
    def read(log: str, version_answer: str, metrics: str) -> ServedBy:
        """Collect the facts.

        Args:
            log: Text of the server's log.
            version_answer: What ``/version`` answered.
            metrics: What ``/metrics`` answered.

        Raises:
            ToolError: If the log or an endpoint does not state one of them.
        """
        labels = metric_labels(metrics, "vllm:cache_config_info")
        names = ("kv_cache_size_tokens", "block_size", "cache_dtype")
        tokens, block_size, dtype = (labels.get(name, "?") for name in names)
        return ServedBy(
            version=json.loads(version_answer)["version"],
            runner=_stated(log, _RUNNER, "model runner"),
            backend=_stated(log, _BACKEND, "attention backend"),
            device=_stated(log, _DEVICE, "device"),
            residency=_residency(metrics),
            cache=f"{tokens} tokens in pages of {block_size}, dtype {dtype}",
        )

    def check(self, build: Build) -> None:
        """Raise unless this is the build that is installed, on the V2 runner.

        Raises:
            ToolError: With both values.
        """
        if self.version != build.version:
            raise ToolError(
                f"the server says that it is vLLM {self.version}, but the build is "
                f"{build.version}",
                "stop whatever else serves on this port, or choose another with --port",
            )
        if self.runner != "V2":
            raise ToolError(
                f"the server uses model runner {self.runner}; this project needs V2",
                "unset VLLM_USE_V2_MODEL_RUNNER",
            )


def _stated(log: str, pattern: re.Pattern[str], what: str) -> str:
    match = pattern.search(log)
    if match is None:
        raise ToolError(
            f"the server's log does not say which {what} it uses",
            "unset VLLM_LOGGING_LEVEL and VLLM_LOGGING_CONFIG_PATH, and run it again",
        )
    return match[1]


def _residency(metrics: str) -> str:
    """A server with HiSparse exports metrics of its own from the start."""
    if "vllm:hisparse_" in metrics:
        return "full or mixed by need: HiSparse on"
    return "full: HiSparse off"
