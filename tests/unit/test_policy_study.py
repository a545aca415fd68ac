# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The study of rules for hot buffers: its rules are exact, its verdict computed."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

np = pytest.importorskip("numpy", reason="the study needs numpy")

import rules  # noqa: E402
import study  # noqa: E402
import verdict  # noqa: E402
from fitting import nelder_mead  # noqa: E402
from simulation import Measured, measure  # noqa: E402
from streams import Model, Shape, next_uses, pick, score_steps  # noqa: E402

import slow_rules  # noqa: E402

# What the kernels' LRU is compared with, too; it needs no torch.
ORACLE = Path(__file__).parents[1] / "kernels" / "lru_oracle.py"
ROWS = 40  # positions of the small streams
EVERY_RULE = (*rules.ONLINE, rules.OPTIMUM)
MODEL = Model(popularity=1.0, drift=0.6, drift_steps=9.0, noise=0.2, recency_rows=4)


def random_steps(seed: int, steps: int, top_k: int, rows: int = ROWS):
    """Picks, ascending, and scores that say nothing of them."""
    rng = np.random.default_rng(seed)
    # Some rows are picked more often than others, or nothing would be worth keeping.
    weight = rng.random(rows) ** 3 + 1e-3
    picks = [
        np.sort(rng.choice(rows, top_k, replace=False, p=weight / weight.sum()))
        for _ in range(steps)
    ]
    return np.array(picks), rng.random((steps, rows), np.float32)


def run_steps(rule: rules.Rule, hot_rows: int, picks, scores, rows: int = ROWS):
    """Misses of every step, and the rows in the buffer after it."""
    buffer = rule.make(hot_rows, rows, 7)
    facts = next_uses(picks, rows) if rule is rules.OPTIMUM else scores
    misses, held = [], []
    for step in range(len(picks)):
        misses.append(buffer.step(picks[step], facts[step]))
        held.append(frozenset(buffer.slot_pos[buffer.slot_pos >= 0].tolist()))
    return misses, held


def named(name: str) -> rules.Rule:
    return next(rule for rule in EVERY_RULE if rule.name == name)


@pytest.mark.parametrize("hot_rows", [6, 7, 12, 24, 33, 64])
def test_lru_gives_the_slots_that_the_oracle_of_the_kernels_gives(
    hot_rows: int,
) -> None:
    oracle = runpy.run_path(str(ORACLE))["HotBuffer"](hot_rows)
    picks, scores = random_steps(3, 80, 6)
    buffer = rules.LRU.make(hot_rows, ROWS, 0)
    missed = 0
    for step in range(len(picks)):
        expected = oracle.step([picks[step].tolist()])
        missed += buffer.step(picks[step], scores[step])
        slots = buffer.pos_slot[picks[step]].tolist()
        assert dict(zip(picks[step].tolist(), slots)) == expected.index
        assert buffer.order.tolist() == list(oracle.slots)
    # Rows came back after they had left.
    assert hot_rows > 24 or missed > len(set(picks.ravel().tolist()))


@pytest.mark.parametrize("hot_rows", [6, 7, 12, 24, 33, 64])
@pytest.mark.parametrize(
    ("name", "slow"),
    [
        ("FIFO", slow_rules.SlowFifo),
        ("random", slow_rules.SlowRandom),
        ("clock", slow_rules.SlowClock),
        ("frequency", slow_rules.SlowFrequency),
        ("score when picked", slow_rules.SlowScoreThen),
        ("LRU, ties by score", slow_rules.SlowLruScoreThen),
    ],
)
def test_rule_holds_the_rows_that_its_slow_form_holds(
    name: str, slow: Callable, hot_rows: int
) -> None:
    picks, scores = random_steps(3, 80, 6)
    misses, held = run_steps(named(name), hot_rows, picks, scores)
    reference = slow(hot_rows)
    for step in range(len(picks)):
        expected = reference.step(picks[step].tolist(), scores[step].tolist())
        assert misses[step] == expected
        assert held[step] == {row for row in reference.rows if row is not None}
    # Rows came back after they had left.
    assert hot_rows > 24 or sum(misses) > len(set(picks.ravel().tolist()))


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("LRU", [2, 3, 4, 5, 7, 6]),
        ("LRU, fetched newest", [2, 3, 4, 5, 6, 7]),
        ("LRU, fetched halfway", [2, 3, 7, 4, 5, 6]),
        ("LRU, fetched oldest", [7, 2, 3, 4, 5, 6]),
    ],
)
def test_fetched_row_enters_the_order_where_the_name_says(
    name: str, order: list[int]
) -> None:
    buffer = named(name).make(6, ROWS, 0)
    scores = np.zeros(ROWS, np.float32)
    buffer.step(np.arange(1, 7), scores)
    buffer.step(np.array([6, 7]), scores)
    assert buffer.slot_pos[buffer.order].tolist() == order


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.name)
def test_all_picks_of_a_step_are_in_the_buffer(rule: rules.Rule) -> None:
    picks, scores = random_steps(4, 60, 6)
    _, held = run_steps(rule, 9, picks, scores)
    assert all(set(p.tolist()) <= h for p, h in zip(picks, held))


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.name)
def test_at_one_top_k_every_rule_misses_what_the_last_step_did_not_pick(
    rule: rules.Rule,
) -> None:
    picks, scores = random_steps(5, 60, 6)
    misses, _ = run_steps(rule, 6, picks, scores)
    pairs = zip(picks[1:].tolist(), picks[:-1].tolist())
    assert misses[1:] == [len(set(now) - set(before)) for now, before in pairs]


def test_score_now_keeps_the_rows_that_score_highest() -> None:
    picks, scores = random_steps(6, 60, 6)
    _, held = run_steps(named("score now"), 12, picks, scores)
    for step in range(1, len(picks)):
        gone = held[step - 1] - held[step]
        stayed = held[step] - set(picks[step].tolist())
        low = [scores[step][row] for row in gone]
        assert not gone or not stayed or max(low) < min(scores[step][list(stayed)])


def test_low_scores_leave_first_and_then_the_oldest() -> None:
    buffer = named("LRU, low scores first").make(5, ROWS, 0)
    scores = np.zeros(ROWS, np.float32)
    for row in (1, 2, 3, 4, 5):
        buffer.step(np.array([row]), scores)
    scores[[1, 3]] = 1.0  # above the mean of rows 1 to 5
    buffer.step(np.array([6, 7]), scores)
    assert set(buffer.slot_pos.tolist()) == {1, 3, 5, 6, 7}


def fewest_misses(picks, hot_rows: int) -> int:
    """By trying every set of rows that the buffer could keep after every step."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for step in picks.tolist():
        needed = frozenset(step)
        following: dict[frozenset[int], int] = {}
        for held, cost in states.items():
            spare = held - needed
            room = min(hot_rows - len(needed), len(spare))
            cost += len(needed - held)
            for size in range(room + 1):
                for kept in combinations(sorted(spare), size):
                    state = needed | frozenset(kept)
                    following[state] = min(cost, following.get(state, cost))
        states = following
    return min(states.values())


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("spare", [0, 1, 2])
def test_optimum_is_what_trying_everything_finds(top_k: int, spare: int) -> None:
    for seed in range(12):
        picks, scores = random_steps(seed, 12, top_k, rows=7)
        misses, _ = run_steps(rules.OPTIMUM, top_k + spare, picks, scores, rows=7)
        assert sum(misses) == fewest_misses(picks, top_k + spare)


@pytest.mark.parametrize("rule", rules.ONLINE, ids=lambda rule: rule.name)
def test_no_rule_beats_the_optimum_up_to_any_step(rule: rules.Rule) -> None:
    for seed in range(5):
        picks, scores = random_steps(seed, 80, 6)
        for hot_rows in (6, 8, 12, 20):
            best = np.cumsum(run_steps(rules.OPTIMUM, hot_rows, picks, scores)[0])
            misses = np.cumsum(run_steps(rule, hot_rows, picks, scores)[0])
            assert (best <= misses).all()


def test_next_use_is_the_next_step_that_picks_the_row() -> None:
    picks = np.array([[1, 2], [2, 3], [1, 3]])
    assert next_uses(picks, 4).tolist() == [[2, 1], [3, 2], [3, 3]]


def test_picks_are_the_best_scores_in_ascending_positions() -> None:
    scores = np.random.default_rng(0).random(101)
    expected = sorted(sorted(range(101), key=lambda row: -scores[row])[:17])
    assert pick(scores, 17).tolist() == expected


def test_context_grows_by_a_row_in_each_step() -> None:
    steps = score_steps(MODEL, Shape(4, 50, 5, 0), 0)
    assert [len(scores) for scores in steps] == [50, 51, 52, 53, 54]


def test_parts_of_a_score_last_as_long_as_the_model_says() -> None:
    def correlation(model: Model, steps: int) -> float:
        shape = Shape(1, 20_000, steps + 1, 0)
        scores = [s[:19_000].copy() for s in score_steps(model, shape, 0)]
        return float(np.corrcoef(scores[0], scores[-1])[0, 1])

    assert correlation(Model(1, 0, 1, 0), 9) == pytest.approx(1.0)
    assert correlation(Model(0, 1, 9, 0), 9) == pytest.approx(np.exp(-1), abs=0.03)
    assert correlation(Model(0, 0, 1, 1), 1) == pytest.approx(0.0, abs=0.03)
    assert correlation(Model(1, 0, 1, 1), 9) == pytest.approx(0.5, abs=0.03)


def test_recency_prefers_the_newest_rows() -> None:
    model = Model(1, 0, 1, 0, recency=50.0, recency_rows=8)
    for scores in score_steps(model, Shape(4, 100, 5, 0), 0):
        newest = len(scores) - 1
        assert pick(scores, 4).tolist() == [newest - i for i in (3, 2, 1, 0)]


def test_a_faster_pace_has_less_overlap() -> None:
    shape = Shape(32, 1024, 60, 30)
    overlaps = [
        measure(MODEL.at_pace(pace), shape, 0, []).overlap for pace in (0.5, 1, 2)
    ]
    assert overlaps == sorted(overlaps, reverse=True)
    assert overlaps[0] - overlaps[2] > 0.2


def test_steps_that_warm_up_are_not_counted() -> None:
    shape = Shape(16, 512, 60, 30)
    measured = measure(MODEL, shape, 0, [(rules.LRU, 1)])
    assert measured.rates["LRU", 1] == pytest.approx(1 - measured.overlap)
    whole = measure(MODEL, replace(shape, warm_up=0), 0, [(rules.LRU, 1)])
    assert whole.rates["LRU", 1] > 1 - whole.overlap


def test_same_seed_gives_the_same_report() -> None:
    shape = Shape(8, 512, 120, 90)
    first, second = (study.run(shape, 2, 1, [0.65, 1.0]) for _ in range(2))
    assert verdict.text(first, "", "", []) == verdict.text(second, "", "", [])
    # Of a rule that draws nothing: what differs is the stream.
    by_seed = [[s.rates["LRU", size] for size in verdict.SIZES] for s in first.by_seed]
    assert by_seed[0] != by_seed[1]


def judged(
    won: dict[str, tuple[float, float]], elsewhere: float = 0.0
) -> verdict.Study:
    """A study in which LRU misses 20 %, the optimum 10 %, and rules win this much."""

    def measured(number: int) -> Measured:
        rates = {
            (rule.name, size): 0.2 - 0.1 * won.get(rule.name, (0.0, 0.0))[number]
            for rule in rules.ONLINE
            for size in verdict.SIZES
        }
        rates |= {("optimum", size): 0.1 for size in verdict.SIZES}
        return Measured(0.7, rates)

    by_seed = [measured(0), measured(1)]
    other = measured(0)
    other.rates["FIFO", 2] -= 0.1 * elsewhere
    others = [verdict.Stream("another", other)]
    shape = Shape(4, 40, 10, 5)
    return verdict.Study(False, MODEL, shape, by_seed, by_seed[0], others, others)


def test_rule_qualifies_that_wins_a_quarter_on_every_seed_at_no_more_work() -> None:
    won = {"clock": (0.26, 0.27), "FIFO": (0.3, 0.2), "score now": (0.9, 0.9)}
    found = judged(won)
    assert [rule.name for rule in verdict.qualified(found)] == ["clock"]
    assert "these win back a quarter: **clock**" in verdict.verdict(found)


def test_verdict_says_that_lru_stays_and_what_more_work_would_win() -> None:
    said = verdict.verdict(judged({"clock": (0.2, 0.3), "score now": (0.5, 0.7)}))
    assert "LRU stays" in said
    assert "no more device work is clock: 18.0 %, 20 % of the gap (20 to 30" in said
    assert "more device work is score now: 15.0 %, 50 % of the gap (50 to 70" in said
    assert "depends on the stream" not in said


def test_verdict_names_a_rule_that_would_win_on_another_stream() -> None:
    said = verdict.verdict(judged({}, elsewhere=0.4))
    assert "FIFO wins 40 % of the gap on 'another'" in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--top-k=0"], "--top-k is 0; give 1 or more"),
        (["--context=8"], "--context is 8; give more than --top-k (8)"),
        (["--warm-up=90"], "--warm-up is 90; give 0 to 89"),
        (["--seeds=0"], "--seeds is 0; give 1 or more"),
        (
            ["--quick", "--top-k=2048", "--context=4096"],
            "--top-k is 2,048; give less than 2,048, the context of another stream",
        ),
        (
            ["--warm-up=2"],
            "x top-k is not full by then; give more steps",
        ),
    ],
)
def test_bad_argument_is_said_with_a_remedy(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Small, so that what is not refused ends soon; the last of two values counts.
    small = ["--top-k=8", "--context=256", "--steps=90", "--warm-up=60"]
    with pytest.raises(SystemExit) as raised:
        study.main([*small, *args])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_rows_of_a_quick_run_have_the_names_of_what_was_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    study.main(["--quick", "--seeds=2", "--top-k=64"])
    out, err = capsys.readouterr()
    assert "calibrated, seed 1" in err
    assert "**A quick run, with few rows and steps:" in out
    assert "Top-k 64 of 4,096 rows" in out and "means over 2 streams" in out
    assert "| context 2,048 |" in out and "| context 8,625 |" in out
    assert "32,768" not in out and "138,000" not in out
    # Arithmetic with another model's top-k would be no figure of that model.
    assert "MB from the host" not in out


def test_what_a_rule_reads_of_scores_follows_from_its_own_misses() -> None:
    found = judged({"score now": (0.5, 0.5)})
    full = replace(found, shape=Shape(2048, 65_536, 10, 5))
    report = verdict.text(full, "", "", [])
    # Of 4,096 slots those without a hit: 2,048 and 15 % of 2,048, not LRU's 20 %.
    assert "it would read about 2,355 logits in each unit" in report


def test_the_report_says_what_every_rule_means_and_who_published_the_rates() -> None:
    report = verdict.text(judged({}), "", "", [])
    words = report.partition("## Words")[2].partition("## Verdict")[0]
    for rule in EVERY_RULE:
        assert f"| {rule.name} | {rule.gives_up} |" in words
    for word in ("gap", "wins", "Device work", "Overlap", "pace", "hit", "miss"):
        assert f"*{word}*" in words
    assert "LongBench-v2 trace: Xie et al., " in report and "arXiv:2608.07009" in report
    assert "A quick run" not in report


def test_buffer_smaller_than_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="picks 16 rows and the hot buffer has 8"):
        measure(MODEL, Shape(16, 512, 6, 3), 0, [(rules.LRU, 0.5)])


def test_simplex_method_finds_a_minimum() -> None:
    target = np.array([0.5, -1.0, 2.0])
    found = nelder_mead(
        lambda x: float(((x - target) ** 2 * [1, 4, 9]).sum()), np.zeros(3), 0.3, 150
    )
    assert found == pytest.approx(target, abs=0.01)


def test_quick_run_writes_what_it_prints_and_two_charts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study.main(["--quick", "--out", str(tmp_path / "new")])
    out, err = capsys.readouterr()
    (written,) = (tmp_path / "new").glob("policy-*.md")
    assert written.read_text(encoding="utf-8") == out
    assert err.splitlines()[0].startswith("[1/7] calibrated, seed 0: overlap 0.")
    for kind, lines in (("overlap", 7), ("size", 8)):
        chart = tmp_path / "new" / f"{written.stem}-{kind}.svg"
        assert f"({chart.name})" in out
        root = ElementTree.parse(chart).getroot()
        texts = [element.text for element in root.iter() if element.text]
        assert {"LRU", "optimum", "score now"} <= set(texts)
        joined = [e for e in root.iter() if e.tag.endswith("polyline")]
        assert len(joined) == 7
        legend = [e for e in root.iter() if e.get("cx") == "560.0"]
        assert len(legend) == lines
