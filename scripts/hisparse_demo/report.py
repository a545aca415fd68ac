# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What the demo prints at the end: who served, the comparison, the first difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hisparse_tools.served_by import Build, ServedBy

from .measure import Load
from .talk import Turn

_NAMES = {False: "without HiSparse", True: "with HiSparse"}


@dataclass(frozen=True)
class Outcome:
    """What came of one server.

    Attributes:
        hisparse: Whether HiSparse was on.
        served: What the server says about itself.
        load: What it did.
        turns: The turns of each conversation.
    """

    hisparse: bool
    served: ServedBy
    load: Load
    turns: Sequence[Sequence[Turn]]

    @property
    def name(self) -> str:
        """How it is called on the page."""
        return _NAMES[self.hisparse]


def page(outcomes: Sequence[Outcome], build: Build) -> str:
    """Return who served, and the first conversation's turns."""
    facts: dict[str, Callable[[ServedBy], str]] = {
        "vLLM": lambda served: served.version,
        "build": lambda _: f"source tree {build.tree}, {build.patches} patches",
        "model runner": lambda served: served.runner,
        "attention": lambda served: served.backend,
        "device": lambda served: served.device,
        "residency": lambda served: served.residency,
        "KV cache": lambda served: served.cache,
    }
    lines = ["What served this, by the server's own log and endpoints:"]
    for name, get in facts.items():
        # Once where the servers agree.
        values = dict.fromkeys(get(outcome.served) for outcome in outcomes)
        lines += [f"  {name:<13} {value}" for value in values]
    for outcome in outcomes:
        lines += ["", f"The first conversation, {outcome.name}:", *_turns(outcome)]
    return "\n".join(lines)


def _turns(outcome: Outcome) -> list[str]:
    lines = ["  turn  prompt tokens  from the prefix cache  new tokens  tokens/s"]
    for number, turn in enumerate(outcome.turns[0], 1):
        rate = len(turn.tokens) / turn.seconds
        lines.append(
            f"  {number:>4}  {turn.prompt_tokens:>13}  {turn.cached_tokens:>21}"
            f"  {len(turn.tokens):>10}  {rate:>8.1f}"
        )
    return lines


def comparison(outcomes: Sequence[Outcome]) -> str:
    """Return the table of what the servers did, a column for each."""
    rows: dict[str, Callable[[Load], str]] = {
        "preemptions": lambda load: f"{load.preemptions:,}",
        "recomputed tokens": lambda load: f"{load.recomputed:,}",
        "  after a preemption": lambda load: f"{load.again_after_preemption:,}",
        "  of earlier turns": lambda load: f"{load.again_of_history:,}",
        "prompt tokens from the cache": lambda load: f"{load.prompt_cached:,}",
        "requests running, most": lambda load: f"{load.most_running}",
        "requests running, mean": lambda load: f"{load.mean_running:.1f}",
        "hot buffer hit rate": _rate,
        "bytes to the host": lambda load: f"{load.to_host:,}",
        "bytes from the host": lambda load: f"{load.from_host:,}",
        "seconds": lambda load: f"{load.seconds:.0f}",
    }
    lines = ["  " + " " * 30 + "".join(f"{o.name:>18}" for o in outcomes)]
    for name, show in rows.items():
        values = "".join(f"{show(outcome.load):>18}" for outcome in outcomes)
        lines.append(f"  {name:<30}{values}")
    return "\n".join(lines)


def _rate(load: Load) -> str:
    return "-" if load.hit_rate is None else f"{100 * load.hit_rate:.1f} %"


def first_difference(
    one: Sequence[Sequence[Turn]], other: Sequence[Sequence[Turn]]
) -> str | None:
    """Return where two servers' outputs differ first; None where they are equal.

    Tokens and log-probabilities are compared bit for bit.
    """
    assert [len(turns) for turns in one] == [len(turns) for turns in other]
    for conversation, pair in enumerate(zip(one, other), 1):
        for number, (a, b) in enumerate(zip(*pair), 1):
            where = f"conversation {conversation}, turn {number}"
            difference = _difference(a, b)
            if difference is not None:
                return f"{where}, {difference}"
    return None


def _difference(a: Turn, b: Turn) -> str | None:
    for name, mine, others in (
        ("token", a.tokens, b.tokens),
        ("log-probability", a.logprobs, b.logprobs),
    ):
        for index, values in enumerate(zip(mine, others), 1):
            if values[0] != values[1]:
                return f"{name} {index}: {values[0]!r} and {values[1]!r}"
        if len(mine) != len(others):
            return f"number of tokens: {len(mine)} and {len(others)}"
    return None if a.text == b.text else f"text: {a.text!r} and {b.text!r}"
