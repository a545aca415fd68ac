# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The patched vLLM computes what transformers' own GlmMoeDsa computes.

Two independent implementations of one set of weights. Greedy tokens are compared
teacher-forced: the reference reads prompt and answer at once, and its best token has to
be vLLM's at every position, so that by induction its own greedy answer is the same.

With sparse selection the two may select differently, since vLLM's indexer works in
fp8; so there the selection is taken from vLLM, and all the rest is compared.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from engines import Engine, Engines

pytest.importorskip("vllm", reason="needs the patched vLLM")

import torch  # noqa: E402
from transformers import GlmMoeDsaForCausalLM  # noqa: E402

from glm_reference import FixedSelection, all_logprobs, load_reference  # noqa: E402

NEW_TOKENS = 40
VOCAB_SIZE = 320
# fp32 rounding of some thirty matrix products in another order, in log-probability.
TOLERANCE = 1e-4

DENSE: dict[str, Any] = {"dtype": "float32", "index_topk": 4096, "context": 4096}
INDEX_TOPK = 32
SPARSE: dict[str, Any] = {"dtype": "float32", "index_topk": INDEX_TOPK}

_TEXT = (
    "A page is sixty-four consecutive tokens of one prefix, in all layers; a row is "
    "what one token keeps in one layer. Most rows are never looked at again! But which "
    "ones? That is what the indexer decides, anew for each token (and 4 layers share). "
)
# Lengths around a page of 64 tokens and a top-k of 32, within one page and across many.
PROMPTS = [list((_TEXT * 2)[:length].encode()) for length in (1, 7, 33, 64, 130, 400)]

Selection = dict[int, torch.Tensor]


@dataclass(frozen=True)
class Answer:
    """vLLM's greedy answer; `logprobs` is float32 [new tokens, vocabulary].

    `selection` has for each leader's layer int [tokens, topk]: the rows that each token
    selected, -1 for none. The last new token has been through no layer, so it has none.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor
    selection: Selection

    @property
    def inputs(self) -> list[int]:
        """The tokens that have been through the model."""
        return self.prompt + self.tokens[:-1]


@contextmanager
def recorded_selection(engine: Engine, length: int) -> Iterator[Selection]:
    """Yield what the leaders will have selected for `length` tokens of one request."""
    selection: Selection = {}
    handles = []

    def record(layer: int, inputs: tuple, buffer: torch.Tensor) -> None:
        positions = inputs[2]
        if layer not in selection:
            selection[layer] = torch.full((length, buffer.shape[1]), -2)
        selection[layer][positions] = buffer[: len(positions)].long()

    for layer, module in enumerate(engine.runner.model.model.layers):
        if indexer := module.self_attn.indexer:
            handles.append(
                indexer.register_forward_hook(
                    lambda _, inputs, out, layer=layer: record(layer, inputs, out)
                )
            )
    try:
        yield selection
    finally:
        for handle in handles:
            handle.remove()


def answer(engine: Engine, prompt: list[int]) -> Answer:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, logprobs=VOCAB_SIZE, ignore_eos=True
    )
    assert engine.llm.reset_prefix_cache()
    with recorded_selection(engine, len(prompt) + NEW_TOKENS - 1) as selection:
        [output] = engine.llm.generate(
            [{"prompt_token_ids": prompt}], params, use_tqdm=False
        )
    steps = output.outputs[0].logprobs
    table = [[step[token].logprob for token in range(VOCAB_SIZE)] for step in steps]
    tokens = list(output.outputs[0].token_ids)
    assert len(tokens) == NEW_TOKENS
    return Answer(prompt, tokens, torch.tensor(table), selection)


def expected_logprobs(reference: GlmMoeDsaForCausalLM, got: Answer) -> torch.Tensor:
    """The reference's log-probabilities where `got` has its own."""
    return all_logprobs(reference, got.inputs)[len(got.prompt) - 1 :]


def largest_difference(reference: GlmMoeDsaForCausalLM, got: Answer) -> float:
    """Over the whole vocabulary, at every step."""
    return (expected_logprobs(reference, got) - got.logprobs).abs().max().item()


@contextmanager
def row_of_one_weight_zeroed(reference: GlmMoeDsaForCausalLM) -> Iterator[None]:
    """One of 128 rows of one matrix of one layer."""
    row = reference.model.layers[3].self_attn.o_proj.weight.data[40]
    before = row.clone()
    row.zero_()
    try:
        yield
    finally:
        row.copy_(before)


@dataclass(frozen=True)
class Pair:
    """One model twice: in transformers, and what vLLM answered with it."""

    reference: GlmMoeDsaForCausalLM
    answers: list[Answer]


def make_pair(engines: Engines, model: dict[str, Any]) -> Pair:
    engine = engines.get(model, max_logprobs=VOCAB_SIZE)
    answers = [answer(engine, prompt) for prompt in PROMPTS]
    return Pair(load_reference(engines.model(**model)), answers)


@pytest.fixture(scope="module")
def dense(engines: Engines) -> Pair:
    return make_pair(engines, DENSE)


@pytest.fixture(scope="module")
def sparse(engines: Engines) -> Pair:
    return make_pair(engines, SPARSE)


class TestDense:
    """`index_topk` covers the context: nothing is left out, so fp8 plays no part."""

    def test_every_greedy_token_is_the_same(self, dense) -> None:
        for got in dense.answers:
            expected = expected_logprobs(dense.reference, got)
            assert got.tokens == expected.argmax(-1).tolist()

    def test_every_log_probability_is_the_same(self, dense, record_property) -> None:
        differences = [
            largest_difference(dense.reference, got) for got in dense.answers
        ]
        record_property("largest_difference", max(differences))
        assert max(differences) <= TOLERANCE, differences

    def test_a_small_difference_of_the_weights_is_noticed(self, dense) -> None:
        with row_of_one_weight_zeroed(dense.reference):
            difference = largest_difference(dense.reference, dense.answers[-1])
        assert difference > 100 * TOLERANCE


class TestSparse:
    """`index_topk` is far below the context."""

    def test_every_token_selects_as_many_distinct_earlier_rows_as_it_may(
        self, sparse
    ) -> None:
        for got in sparse.answers:
            for rows in got.selection.values():
                for position, selected in enumerate(rows.tolist()):
                    kept = {row for row in selected if row != -1}
                    assert len(kept) == min(INDEX_TOPK, position + 1)
                    assert len(kept) == INDEX_TOPK - selected.count(-1)
                    assert all(0 <= row <= position for row in kept)

    def test_given_the_same_rows_tokens_and_log_probabilities_are_the_same(
        self, sparse, record_property
    ) -> None:
        differences = []
        for got in sparse.answers:
            with FixedSelection(sparse.reference, got.selection):
                expected = expected_logprobs(sparse.reference, got)
            assert got.tokens == expected.argmax(-1).tolist()
            differences.append((expected - got.logprobs).abs().max().item())
        record_property("largest_difference", max(differences))
        assert max(differences) <= TOLERANCE, differences

    @pytest.mark.parametrize("leader", [0, 1, 5])
    def test_one_wrong_row_of_one_leader_is_noticed(self, sparse, leader) -> None:
        """One token selects one other row: its own log-probabilities change."""
        got = sparse.answers[-1]
        rows = got.selection[leader].clone()
        last = set(rows[-1].tolist())
        rows[-1, 0] = next(row for row in range(len(rows)) if row not in last)
        with FixedSelection(sparse.reference, got.selection | {leader: rows}):
            assert largest_difference(sparse.reference, got) > 10 * TOLERANCE

    def test_followers_are_compared_too(self, sparse) -> None:
        """Layers 2 to 4 follow layer 1: with layer 0's rows the outputs differ."""
        got = sparse.answers[-1]
        kinds = sparse.reference.config.indexer_types
        assert kinds[:5] == ["full"] * 2 + ["shared"] * 3
        with FixedSelection(sparse.reference, got.selection | {1: got.selection[0]}):
            assert largest_difference(sparse.reference, got) > 100 * TOLERANCE

    def test_both_indexers_select_nearly_the_same_rows(
        self, sparse, record_property
    ) -> None:
        """The first leader sees equal inputs; it differs by fp8 rounding alone."""
        shares = []
        for got in sparse.answers[2:]:
            with recorded_own_selection(sparse.reference, layer=0) as own:
                all_logprobs(sparse.reference, got.inputs)
            pairs = zip(got.selection[0].tolist(), own[0].tolist(), strict=True)
            for position, (rows, own_rows) in enumerate(pairs):
                if position >= INDEX_TOPK:
                    shares.append(len(set(rows) & set(own_rows)) / len(own_rows))
        mean = sum(shares) / len(shares)
        record_property("mean_share", mean)
        assert mean > 0.95


@contextmanager
def recorded_own_selection(
    reference: GlmMoeDsaForCausalLM, layer: int
) -> Iterator[list[torch.Tensor]]:
    """Yield a list that gets what the reference's leader selects, [tokens, topk]."""
    found: list[torch.Tensor] = []
    indexer = reference.model.layers[layer].self_attn.indexer
    handle = indexer.register_forward_hook(lambda *io: found.append(io[2][0]))
    try:
        yield found
    finally:
        handle.remove()
