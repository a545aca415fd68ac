# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Sampling parameters of the API, on the CPU reference path.

A served model gets them all; the runner's sampling kernels run in the interpreter.
"""

import pytest

from engines import Engine, Engines

PROMPT = "Hello there"
NEW_TOKENS = 8


@pytest.fixture(scope="module", params=[0, 3], ids=["plain", "mtp"])
def engine(engines: Engines, request: pytest.FixtureRequest) -> Engine:
    if not request.param:
        return engines.get()
    drafts = {"method": "mtp", "num_speculative_tokens": request.param}
    return engines.get(speculative_config=drafts)


@pytest.fixture
def sample(engine: Engine):
    """A function from sampling parameters to the request's output."""
    from vllm import SamplingParams

    def run(**options):
        options = {"max_tokens": NEW_TOKENS, "ignore_eos": True} | options
        params = SamplingParams(**options)
        return engine.llm.generate([PROMPT], params, use_tqdm=False)[0]

    return run


def tokens(output) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_seeded_sampling_repeats_and_differs_from_other_seeds(sample) -> None:
    first = tokens(sample(seed=1))
    assert tokens(sample(seed=1)) == first
    assert len({tuple(tokens(sample(seed=seed))) for seed in range(4)}) > 1


def test_sampled_tokens_follow_the_distribution(sample) -> None:
    """One token 160 times, against the log-probability the model gives it."""
    greedy = sample(max_tokens=1, temperature=0, logprobs=1).outputs[0]
    (best,) = greedy.token_ids
    chance = 2.718281828 ** greedy.logprobs[0][best].logprob
    assert 0.05 < chance < 0.95
    drawn = sample(max_tokens=1, n=160, seed=11).outputs
    share = sum(o.token_ids[0] == best for o in drawn) / len(drawn)
    # Four standard deviations.
    assert abs(share - chance) < 4 * (chance * (1 - chance) / len(drawn)) ** 0.5


def test_one_candidate_is_greedy(sample) -> None:
    greedy = tokens(sample(temperature=0))
    assert tokens(sample(top_k=1, seed=1)) == greedy
    assert tokens(sample(top_p=1e-6, seed=1)) == greedy


def test_allowed_and_bad_words(sample) -> None:
    assert set(tokens(sample(allowed_token_ids=[65, 66]))) <= {65, 66}
    greedy = sample(temperature=0).outputs[0].text
    without = sample(temperature=0, bad_words=[greedy[0]]).outputs[0].text
    assert greedy[0] not in without


def test_penalties_change_the_output(sample) -> None:
    greedy = tokens(sample(temperature=0, max_tokens=24))
    penalized = tokens(
        sample(
            temperature=0,
            max_tokens=24,
            presence_penalty=2.0,
            frequency_penalty=2.0,
            repetition_penalty=1.5,
        )
    )
    assert len(set(penalized)) > len(set(greedy))


def test_choices_of_structured_output(sample) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    choice = StructuredOutputsParams(choice=["yes", "no"])
    output = sample(structured_outputs=choice, ignore_eos=False)
    assert output.outputs[0].text in ("yes", "no")


def test_stop_string_ends_the_output(sample) -> None:
    greedy = sample(temperature=0).outputs[0].text
    stopped = sample(temperature=0, stop=[greedy[2]]).outputs[0]
    assert stopped.text == greedy[: greedy.index(greedy[2])]
    assert stopped.finish_reason == "stop"


def test_several_samples_and_prompt_logprobs(sample) -> None:
    output = sample(n=3, seed=5, prompt_logprobs=1, logprobs=2)
    assert len({o.text for o in output.outputs}) > 1
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert all(len(step) >= 2 for o in output.outputs for step in o.logprobs)
