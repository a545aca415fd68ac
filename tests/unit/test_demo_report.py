# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What the demo measures, what it prints of it, and its picture."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

import demo_session
from hisparse_demo import chart, talk
from hisparse_demo.measure import Load, Monitor, Sample, capacity_pages, computed_tokens
from hisparse_demo.report import Outcome, comparison, first_difference, page
from hisparse_demo.talk import Talk, Turn
from hisparse_tools.demo_settings import DemoSettings, parse_settings
from hisparse_tools.errors import ToolError
from hisparse_tools.pins import Device
from hisparse_tools.served_by import Build, ServedBy

# As a server writes them, shortened. Two requests of one conversation: 40 tokens and
# an answer of 10; then 60 tokens, of which 32 were cached, and an answer of 10.
METRICS = """\
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:num_preemptions_total{engine="0"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:cache_config_info{block_size="16",kv_cache_size_tokens="880",\
num_gpu_blocks="55"} 1.0
vllm:prompt_tokens_total{engine="0"} 100.0
vllm:prompt_tokens_cached_total{engine="0"} 32.0
vllm:generation_tokens_total{engine="0"} 20.0
"""
HISPARSE = """\
vllm:hisparse_cache_hits_total{engine="0"} 30.0
vllm:hisparse_cache_misses_total{engine="0"} 10.0
vllm:hisparse_device_to_host_bytes_total{engine="0"} 1.169280e+06
vllm:hisparse_host_to_device_bytes_total{engine="0"} 2e+06
vllm:hisparse_pages_device{engine="0"} 4.0
vllm:hisparse_pages_both{engine="0"} 5.0
vllm:hisparse_pages_host{engine="0"} 6.0
"""
LINE = (
    "(APIServer pid=1) INFO 11-30 02:29:14 [loggers.py:181] Engine 000: Iteration({}): "
    "1 context requests, {} context tokens, 1 generation requests, {} generation "
    "tokens, iteration elapsed time: 9.87 ms, GPU KV cache usage: 1.0%\n"
)
# 40 + 9 and 28 + 9 tokens are needed; 17 were computed again after the preemption.
LOG = LINE.format(0, 40, 0) + LINE.format(1, 28, 18) + LINE.format(2, 0, 17)


def turn(prompt: int = 40, answer: int = 10, cached: int = 0) -> Turn:
    numbers = range(answer)
    return Turn(
        "x" * answer, tuple(numbers), tuple(-i / 8 for i in numbers), prompt, cached, 2
    )


TALK = [[turn(40), turn(60, cached=32)]]


def sample(seconds: float, **values: int) -> Sample:
    fields = dict.fromkeys(
        ("running", "waiting", "preemptions", "device", "both", "host"), 0
    )
    return Sample(seconds, **(fields | values))


class TestMeasure:
    def test_without_hisparse_pages_in_use_are_on_the_device_only(self) -> None:
        """Half of 54 blocks; one is vLLM's own."""
        assert Sample.read(METRICS, 1.5) == Sample(1.5, 3, 2, 1, 27, 0, 0)

    def test_with_hisparse_pages_are_counted_by_residency(self) -> None:
        assert Sample.read(METRICS + HISPARSE, 1.5) == Sample(1.5, 3, 2, 1, 4, 5, 6)

    def test_the_device_holds_what_the_server_says(self) -> None:
        assert capacity_pages(METRICS) == 55

    def test_computed_tokens_are_those_of_all_steps(self) -> None:
        assert computed_tokens(LOG) == 40 + 46 + 17

    def test_recomputed_tokens_are_those_beyond_what_was_said(self) -> None:
        """The conversation came to 60 + 10 tokens; the last is not computed."""
        load = Load.read(METRICS, LOG, [], TALK)
        assert load.recomputed == 103 - 69
        assert load.again_after_preemption == 17
        # The first turn computed 49 tokens; the second found 32 of them.
        assert load.again_of_history == 49 - 32

    def test_running_requests_are_counted_while_there_are_any(self) -> None:
        samples = [
            sample(0),
            sample(1, running=1, waiting=4),
            sample(2, running=5),
            sample(3, waiting=1),
            sample(4),
        ]
        load = Load.read(METRICS, LOG, samples, TALK)
        assert (load.most_running, load.mean_running) == (5, 2)
        assert load.seconds == 4

    def test_hits_are_a_share_of_the_rows_that_were_not_resident(self) -> None:
        load = Load.read(METRICS + HISPARSE, LOG, [], TALK)
        assert load.hit_rate == 0.75
        assert (load.to_host, load.from_host) == (1_169_280, 2_000_000)
        assert Load.read(METRICS, LOG, [], TALK).hit_rate is None

    def test_a_server_that_does_not_answer_gives_no_sample(self) -> None:
        answers = iter([METRICS, None, METRICS + HISPARSE])

        def get() -> str | None:
            answer = next(answers, None)
            if answer is not None and HISPARSE in answer:
                monitor._stop.set()
            return answer

        monitor = Monitor(get)
        with monitor:
            monitor._thread.join(10)
        assert [s.host for s in monitor.samples] == [0, 6]
        assert monitor.samples[0].seconds < monitor.samples[1].seconds


def outcome(hisparse: bool, **changes: object) -> Outcome:
    metrics = METRICS + HISPARSE if hisparse else METRICS
    load = Load.read(metrics, LOG, [sample(1, running=3)], TALK)
    residency = "full or mixed: on" if hisparse else "full: off"
    served = ServedBy("1", "V2", "B", "cpu", residency, "c")
    return Outcome(hisparse, served, dataclasses.replace(load, **changes), TALK)


class TestReport:
    def test_the_comparison_has_a_column_for_each_server(self) -> None:
        lines = comparison([outcome(False, preemptions=1234), outcome(True)])
        head, *rows = lines.splitlines()
        assert head.split() == ["without", "HiSparse", "with", "HiSparse"]
        assert len({len(line) for line in [head, *rows]}) == 1
        columns = {row[:32].strip(): row[32:].split() for row in rows}
        assert columns["preemptions"] == ["1,234", "1"]
        assert columns["recomputed tokens"] == ["34", "34"]
        assert columns["after a preemption"] == ["17", "17"]
        assert columns["requests running, most"] == ["3", "3"]
        assert columns["requests running, mean"] == ["3.0", "3.0"]
        assert columns["hot buffer hit rate"] == ["-", "75.0", "%"]
        assert columns["bytes to the host"] == ["0", "1,169,280"]
        assert columns["bytes from the host"] == ["0", "2,000,000"]

    def test_facts_are_stated_once_where_the_servers_agree(self) -> None:
        text = page([outcome(False), outcome(True)], Build("1", "abc", 3))
        assert len(re.findall(r"^  device +cpu$", text, re.M)) == 1
        assert re.findall(r"^  residency +(.*)$", text, re.M) == [
            "full: off",
            "full or mixed: on",
        ]

    def test_each_servers_first_conversation_is_shown(self) -> None:
        text = page([outcome(False), outcome(True)], Build("1", "abc", 3))
        rows = re.findall(r"^ +2 +60 +32 +10 +5\.0$", text, re.M)
        assert len(rows) == 2


class TestOutputs:
    def test_equal_outputs_have_no_difference(self) -> None:
        assert first_difference(TALK, [[turn(40), turn(60, cached=48)]]) is None

    @pytest.mark.parametrize(
        ("changes", "what"),
        [
            ({"tokens": (0, 1, 9, 3)}, "token 3: 2 and 9"),
            (
                {"logprobs": (0.0, -0.125, -0.25000000000000006, -0.375)},
                "log-probability 3: -0.25 and -0.25000000000000006",
            ),
            (
                {"tokens": (0, 1), "logprobs": (0.0, -0.125)},
                "number of tokens: 4 and 2",
            ),
            ({"text": "xxxy"}, "text: 'xxxx' and 'xxxy'"),
        ],
    )
    def test_the_first_difference_is_named(self, changes: dict, what: str) -> None:
        same = turn(answer=4)
        other = dataclasses.replace(same, **changes)
        found = first_difference([[same], [same, same]], [[same], [same, other]])
        assert found == f"conversation 2, turn 2, {what}"


class TestConclusion:
    """What the session says at the end."""

    BUILD = Build("1", "abc", 3)

    @pytest.fixture
    def settings(self, tmp_path: Path) -> DemoSettings:
        return parse_settings([], Device.CPU, str(tmp_path / "out"))

    def part(self, one: Outcome) -> demo_session.Served:
        run = chart.Run("x", [sample(0), sample(1, device=1)], 2)
        return demo_session.Served(one, run)

    def test_equal_outputs_are_said_and_the_picture_is_named(
        self, settings: DemoSettings, capsys: pytest.CaptureFixture[str]
    ) -> None:
        parts = [self.part(outcome(False)), self.part(outcome(True))]
        demo_session.conclude(settings, parts, self.BUILD)
        text = capsys.readouterr().out
        assert "outputs: equal, 2 answers, 20 tokens and" in text
        path = Path(settings.out, "pages.svg")
        assert f"over time: {path}\n" in text
        assert "too short" not in text
        assert ElementTree.parse(path).getroot().tag.endswith("svg")

    def test_outputs_that_differ_are_an_error(
        self, settings: DemoSettings, capsys: pytest.CaptureFixture[str]
    ) -> None:
        [[first, last]] = TALK
        other = [[first, dataclasses.replace(last, tokens=(5, *last.tokens[1:]))]]
        changed = dataclasses.replace(outcome(True), turns=other)
        parts = [self.part(outcome(False)), self.part(changed)]
        with pytest.raises(ToolError, match="turn 2, token 1: 0 and 5"):
            demo_session.conclude(settings, parts, self.BUILD)
        text = capsys.readouterr().out
        assert "equal" not in text and "preemptions" in text

    def test_conversations_without_pressure_are_called_too_short(
        self, settings: DemoSettings, capsys: pytest.CaptureFixture[str]
    ) -> None:
        parts = [self.part(outcome(False, preemptions=0)), self.part(outcome(True))]
        demo_session.conclude(settings, parts, self.BUILD)
        assert "too short to show\nthe difference" in capsys.readouterr().out

    def test_one_server_is_compared_with_none(
        self, settings: DemoSettings, capsys: pytest.CaptureFixture[str]
    ) -> None:
        demo_session.conclude(settings, [self.part(outcome(True))], self.BUILD)
        text = capsys.readouterr().out
        assert "outputs:" not in text and "preemptions" in text

    def test_counters_are_read_once_all_tokens_are_counted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        late = METRICS.replace('tokens_total{engine="0"} 20', "tokens_total{} 19")
        answers = iter([late, METRICS])
        monkeypatch.setattr(demo_session, "endpoint", lambda *args: next(answers))
        assert demo_session.settled_metrics(None, "", 20) == METRICS


def chunk(**fields: object) -> SimpleNamespace:
    """A piece of an answer as the client gives it."""
    usage = SimpleNamespace(
        prompt_tokens=9,
        completion_tokens=2,
        prompt_tokens_details=SimpleNamespace(cached_tokens=4),
    )
    return SimpleNamespace(**({"choices": [], "usage": usage} | fields))


def choice(text: str, token: int, logprob: float | None) -> SimpleNamespace:
    entries = None
    if logprob is not None:
        entries = SimpleNamespace(content=[SimpleNamespace(logprob=logprob)])
    one = SimpleNamespace(
        delta=SimpleNamespace(content=text), token_ids=[token], logprobs=entries
    )
    return chunk(choices=[one], usage=None)


class EndedServer:
    """One whose end is noticed at once."""

    def check(self, doing: str) -> None:
        raise ToolError(f"it ended while {doing}", "look")


class TestTalk:
    SAID = (("hi", "and?"), ("2. hi", "and?"))

    def talk(self) -> Talk:
        return Talk(EndedServer(), "http://127.0.0.1:9", self.SAID, 2)  # type: ignore[arg-type]

    def answer_with(
        self, monkeypatch: pytest.MonkeyPatch, *chunks: SimpleNamespace
    ) -> None:
        def stream(conversation: object) -> Iterator[SimpleNamespace]:
            return iter(chunks)

        monkeypatch.setattr(talk._Conversation, "_stream", stream)

    def test_all_conversations_are_held_and_the_first_is_shown(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.answer_with(
            monkeypatch, choice("o", 7, -0.5), choice("k", 8, -0.25), chunk()
        )
        turns = self.talk().hold()
        assert [len(conversation) for conversation in turns] == [2, 2]
        one = turns[1][1]
        assert (one.text, one.tokens, one.logprobs) == ("ok", (7, 8), (-0.5, -0.25))
        assert (one.prompt_tokens, one.cached_tokens) == (9, 4)
        text = capsys.readouterr().out
        assert "\nuser>  hi\nmodel> ok\n\nuser>  and?\nmodel> ok\n" in text
        assert "2. hi" not in text

    @pytest.mark.parametrize(
        "chunks",
        [
            (choice("o", 7, None), choice("k", 8, -0.25), chunk()),
            (choice("o", 7, -0.5), chunk()),
            (choice("o", 7, -0.5), choice("k", 8, -0.25)),
        ],
    )
    def test_an_answer_that_lacks_something_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch, chunks: tuple[SimpleNamespace, ...]
    ) -> None:
        """A log-probability, a token, the count."""
        self.answer_with(monkeypatch, *chunks)
        with pytest.raises(ToolError, match="it ended while answering"):
            self.talk().hold()


class TestPicture:
    RUNS = (
        chart.Run(
            "without",
            [
                sample(0),
                sample(1, device=20, running=2, waiting=1),
                sample(2, device=10, running=1, preemptions=1),
                sample(3, preemptions=1),
            ],
            capacity=25,
        ),
        chart.Run(
            "with",
            [sample(0), sample(2, device=1, both=4, host=45, running=3), sample(6)],
            capacity=25,
        ),
    )

    def elements(self, kind: str, name: str) -> list[dict[str, str]]:
        root = ElementTree.fromstring(chart.draw(self.RUNS))
        found = root.iter(f"{{http://www.w3.org/2000/svg}}{kind}")
        return [dict(e.attrib) for e in found if e.get("class") == name]

    def points(self, name: str, run: int) -> list[tuple[float, float]]:
        text = self.elements("polygon", name)[run]["points"]
        pairs = (pair.split(",") for pair in text.split())
        return [(float(x), float(y)) for x, y in pairs]

    def test_amounts_are_heights_on_one_scale(self) -> None:
        """60 pages, the next ten above the most, are 150 units high."""
        for run, pages in ((0, 20), (1, 1)):
            ys = [y for _, y in self.points("device", run)]
            assert max(ys) - min(ys) == pytest.approx(pages * 150 / 60, abs=0.11)

    def test_pages_are_stacked(self) -> None:
        tops = [min(y for _, y in self.points(name, 1)) for name in ("device", "both")]
        host = [y for _, y in self.points("host", 1)]
        assert tops[0] - tops[1] == pytest.approx(4 * 150 / 60, abs=0.11)
        assert tops[1] - min(host) == pytest.approx(45 * 150 / 60, abs=0.11)

    def test_both_runs_have_one_time_scale(self) -> None:
        right = [max(x for x, _ in self.points("device", run)) for run in (0, 1)]
        left = min(x for x, _ in self.points("device", 0))
        assert right[0] - left == pytest.approx((right[1] - left) / 2, abs=0.2)

    def test_a_value_holds_until_the_next_sample(self) -> None:
        """20 pages from second 1 to second 2, of 6 seconds."""
        points = self.points("device", 0)
        highest = min(y for _, y in points)
        xs = [x for x, y in points if y == highest]
        width = max(x for x, _ in self.points("device", 1)) - min(x for x, _ in points)
        assert max(xs) - min(xs) == pytest.approx(width / 6, abs=0.11)

    def test_a_preemption_is_marked_when_it_was_seen(self) -> None:
        """One in the picture of the first run, and the one that explains it."""
        assert len(self.elements("path", "preempted")) == 2

    def test_what_the_device_holds_is_a_line_in_each(self) -> None:
        assert len(self.elements("path", "limit")) == 2

    @pytest.mark.parametrize(
        ("seconds", "step"), [(1, 1), (9, 1), (11, 2), (94, 10), (101, 20), (480, 50)]
    )
    def test_seconds_are_marked_at_round_numbers(self, seconds: int, step: int) -> None:
        run = chart.Run("x", [sample(0), sample(seconds)], 1)
        marks = re.findall(r">(\d+) s<", chart.draw([run]))
        assert marks == [str(n) for n in range(0, seconds + 1, step)]
