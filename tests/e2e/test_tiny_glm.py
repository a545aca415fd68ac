# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The tiny GLM is worth testing with: what it computes depends on every part of it.

A random model can hide damage: logits that are near uniform, text that falls into a
loop, attention that does not care which rows it reads, drafts that are never accepted.
Each test here measures one of these on the default sizes, through transformers' own
implementation; the drafts through vLLM.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the patched vLLM")

import torch  # noqa: E402
from transformers import AutoTokenizer, GlmMoeDsaForCausalLM  # noqa: E402
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa  # noqa: E402

from engines import Engines  # noqa: E402
from glm_reference import FixedSelection, all_logprobs, load_reference  # noqa: E402

NEW_TOKENS = 64
LEADERS = (0, 1, 5)
LAST_LAYER = 5
# Rounding differs by about 3e-5 between implementations; damage has to stand out.
VISIBLE = 0.01

_PROSE = (
    "The quick brown fox jumps over the lazy dog. How vexingly quick daft zebras jump! "
    "Pack my box with five dozen jugs, said the wizard, and off he went again."
)
_CODE = (
    "def attention(q, k, v):\n    scores = q @ k.transpose(-1, -2)\n    return "
    "softmax(scores) @ v\n# a comment that runs on until there is enough of it"
)
_NUMBERS = (
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584, 4181, "
    "6765, 10946, 17711, 28657, 46368, 75025, 121393, 196418, 317811"
)
TEXTS = (_PROSE, _CODE, _NUMBERS)


@dataclass(frozen=True)
class Text:
    """A prompt with its greedy continuation.

    `logprobs` is [tokens, vocabulary]; `selection` has int [tokens, topk] by leader.
    """

    tokens: list[int]
    prompt_length: int
    logprobs: torch.Tensor
    selection: dict[int, torch.Tensor]

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]


@pytest.fixture(scope="module")
def folder(engines: Engines) -> Path:
    return engines.model(dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> GlmMoeDsaForCausalLM:
    return load_reference(folder)


@contextmanager
def hooked(*hooks: tuple[torch.nn.Module, Callable]) -> Iterator[None]:
    """Call each function with its module's output; it may return another one."""
    handles = [
        module.register_forward_hook(
            lambda _, __, out, function=function: function(out)
        )
        for module, function in hooks
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def selected_rows(
    model: GlmMoeDsaForCausalLM, tokens: list[int]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Log-probabilities, and what each leader selects; -1 where there is no row."""
    found: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Callable[[torch.Tensor], None]:
        return lambda rows: found.update({layer: rows[0].long()})

    layers = model.model.layers
    with hooked(*((layers[i].self_attn.indexer, keep(i)) for i in LEADERS)):
        logprobs = all_logprobs(model, tokens)
    for rows in found.values():
        rows[rows > torch.arange(len(rows)).unsqueeze(1)] = -1
    return logprobs, found


@pytest.fixture(scope="module")
def texts(model: GlmMoeDsaForCausalLM, tokenizer) -> list[Text]:
    result = []
    for content in TEXTS:
        message = {"role": "user", "content": content}
        prompt = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_dict=False
        )
        [tokens] = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False
        ).tolist()
        logprobs, selection = selected_rows(model, tokens)
        result.append(Text(tokens, len(prompt), logprobs, selection))
    return result


def zeroed(row: int | slice) -> Callable[[torch.Tensor], torch.Tensor]:
    def zero(output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, row] = 0
        return output

    return zero


def change_at_the_end(
    model: GlmMoeDsaForCausalLM, text: Text, *hooks: tuple[torch.nn.Module, Callable]
) -> float:
    """Largest change of the last token's log-probabilities."""
    with hooked(*hooks), FixedSelection(model, text.selection):
        changed = all_logprobs(model, text.tokens)
    return (changed - text.logprobs)[-1].abs().max().item()


def lost_row(model: GlmMoeDsaForCausalLM, layer: int, row: int) -> tuple:
    """Hooks that zero one KV row, latent and rotary part, of one layer."""
    attention = model.model.layers[layer].self_attn
    return (
        (attention.kv_a_proj_with_mqa, zeroed(row)),
        (attention.kv_a_layernorm, zeroed(row)),
    )


class TestTokenizer:
    @pytest.mark.parametrize(
        "text",
        [
            "",
            "plain",
            " lead and trail  ",
            "tab\tnew\nline\r\n",
            "naïve Ünïcödé",
            "中文字",
        ]
        + ["🎉👩‍👩‍👧‍👦", "\x00\x01\x1b[31m", "\u202eright to left", "e\u0301 versus é"]
        + ["a<|user|>b[gMASK]", "".join(map(chr, range(1, 0x300)))],
    )
    def test_any_text_survives_a_round_trip(self, tokenizer, text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_a_token_is_a_byte(self, tokenizer) -> None:
        text = "aé中🎉"
        assert tokenizer.encode(text) == list(text.encode())

    def test_every_id_of_the_vocabulary_has_a_token(self, tokenizer, model) -> None:
        assert len(tokenizer) == model.config.vocab_size
        names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        assert len(set(names)) == len(names) and None not in names

    def test_a_later_turn_begins_with_all_of_the_earlier_one(self, tokenizer) -> None:
        """So the prefix cache can hold a conversation."""
        messages = [{"role": "user", "content": "one"}]
        first = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        messages += [
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "three"},
        ]
        second = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        assert first == "[gMASK]<sop><|user|>\none<|assistant|>\n"
        assert second == first + "two<|user|>\nthree<|assistant|>\n"

    def test_the_end_of_text_is_known_to_tokenizer_and_model(
        self, tokenizer, model
    ) -> None:
        assert tokenizer.eos_token_id in model.generation_config.eos_token_id


class TestOutput:
    def test_the_distribution_is_neither_flat_nor_a_spike(
        self, texts, record_property
    ) -> None:
        """In nats; a uniform choice of 95 printable bytes would be 4.6."""
        entropies = torch.cat(
            [-(t.logprobs.exp() * t.logprobs).sum(-1)[t.prompt_length :] for t in texts]
        )
        record_property("mean_entropy", entropies.mean().item())
        assert 0.7 < entropies.mean() < 2.5
        assert entropies.std() > 0.3

    def test_greedy_text_does_not_fall_into_a_loop(
        self, texts, record_property
    ) -> None:
        distinct = [len(set(text.new_tokens)) for text in texts]
        record_property("distinct_tokens", min(distinct))
        assert min(distinct) >= 20
        for text in texts:
            end = text.new_tokens[-32:]
            assert all(end[period:] != end[:-period] for period in range(1, 17))

    def test_the_next_token_depends_on_more_than_the_last_one(self, texts) -> None:
        """Otherwise each token would have one successor only."""
        for text in texts:
            pairs = set(zip(text.new_tokens, text.new_tokens[1:], strict=False))
            assert len(pairs) > 1.2 * len(set(text.new_tokens))

    def test_greedy_text_is_printable_and_does_not_end_early(self, texts) -> None:
        for text in texts:
            assert len(text.new_tokens) == NEW_TOKENS
            assert all(0x20 <= token < 0x7F for token in text.new_tokens)

    def test_texts_differ(self, texts) -> None:
        assert len({tuple(text.new_tokens) for text in texts}) == len(texts)


class TestRows:
    @pytest.mark.parametrize("layer", range(LAST_LAYER + 1))
    def test_any_lost_row_that_was_selected_is_visible(
        self, model, texts, layer, record_property
    ) -> None:
        """Every row that the last token's leader selected, one at a time."""
        text = texts[0]
        leader = max(i for i in LEADERS if i <= layer)
        changes = [
            change_at_the_end(model, text, *lost_row(model, layer, row))
            for row in text.selection[leader][-1].tolist()[::3]
        ]
        record_property("least_change", min(changes))
        record_property("median_change", sorted(changes)[len(changes) // 2])
        assert min(changes) > VISIBLE / 10
        assert sorted(changes)[len(changes) // 2] > VISIBLE

    def test_a_row_that_was_not_selected_plays_no_part(self, model, texts) -> None:
        """In the last layer, where nothing can carry it to another token."""
        text = texts[0]
        selected = set(text.selection[LAST_LAYER][-1].tolist())
        others = [row for row in range(len(text.tokens)) if row not in selected][::17]
        assert len(others) > 5
        for row in others:
            hooks = lost_row(model, LAST_LAYER, row)
            assert change_at_the_end(model, text, *hooks) == 0


class TestSelection:
    def test_a_lost_page_of_an_indexer_is_visible(self, model, texts) -> None:
        for leader in LEADERS:
            norm = model.model.layers[leader].self_attn.indexer.k_norm
            with hooked((norm, zeroed(slice(0, 64)))):
                changed = all_logprobs(model, texts[0].tokens)
            assert (changed - texts[0].logprobs)[-1].abs().max() > VISIBLE

    def test_tokens_select_different_rows(self, texts, record_property) -> None:
        """Neither the same rows for ever, nor new ones each time."""
        shares = []
        for text in texts:
            for rows in text.selection.values():
                sets = [set(r) for r in rows[text.prompt_length :].tolist()]
                pairs = zip(sets, sets[1:], strict=False)
                shares += [len(one & two) / len(two) for one, two in pairs]
        mean = sum(shares) / len(shares)
        record_property("kept_from_token_to_token", mean)
        assert 0.25 < mean < 0.8

    def test_selected_rows_are_old_and_new(self, texts) -> None:
        """A cache of recent rows alone would miss most of them."""
        for text in texts:
            rows = text.selection[LAST_LAYER][-1]
            old = (rows < len(text.tokens) // 2).float().mean()
            assert 0.2 < old < 0.8

    def test_leaders_select_different_rows(self, texts) -> None:
        for text in texts:
            sets = [set(text.selection[leader][-1].tolist()) for leader in LEADERS]
            assert len(sets[0] & sets[1]) < 24 and len(sets[1] & sets[2]) < 24

    def test_index_scores_do_not_tie_at_zero(
        self, model, texts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A row whose score every head cuts off ties with the others of its kind."""
        cut_off, pairs = 0, 0
        relu = torch.nn.functional.relu

        def counting(scores: torch.Tensor) -> torch.Tensor:
            nonlocal cut_off, pairs
            result = relu(scores)
            length = result.shape[1]
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            cut_off += (result[0] == 0).all(dim=1)[causal].sum().item()
            pairs += causal.sum().item()
            return result

        monkeypatch.setattr(modeling_glm_moe_dsa.F, "relu", counting)
        all_logprobs(model, texts[0].tokens)
        assert pairs > 10_000
        assert cut_off / pairs < 0.01


def test_routing_varies_with_the_token(model, texts) -> None:
    """No expert is dead, none does most of the work, and many pairs occur."""
    for layer in model.model.layers[1:]:
        chosen: list[torch.Tensor] = []
        with hooked((layer.mlp.gate, lambda out, to=chosen: to.append(out[2]))):
            for text in texts:
                all_logprobs(model, text.tokens)
        pairs = torch.cat(chosen).sort(dim=1).values
        shares = torch.bincount(pairs.flatten(), minlength=8) / pairs.numel()
        assert shares.min() > 0 and shares.max() < 0.4
        assert len(pairs.unique(dim=0)) >= 14  # of 28


def test_bfloat16_weights_are_the_float32_ones_rounded(
    engines: Engines, folder: Path
) -> None:
    from safetensors.torch import load_file

    exact = load_file(folder / "model.safetensors")
    rounded = load_file(engines.model(dtype="bfloat16") / "model.safetensors")
    assert exact.keys() == rounded.keys()
    for name, tensor in rounded.items():
        assert torch.equal(tensor, exact[name].to(tensor.dtype))


@pytest.mark.slow
def test_a_fair_share_of_drafts_is_accepted(engines: Engines, record_property) -> None:
    """At every draft position, and not all of them either."""
    engine = engines.get(
        speculative_config={"method": "mtp", "num_speculative_tokens": 3}
    )

    def counts() -> list[int]:
        metrics = {metric.name: metric for metric in engine.llm.get_metrics()}
        drafts = metrics["vllm:spec_decode_num_drafts"].value
        accepted = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
        return [drafts, *accepted]

    before = counts()
    engine.generate([list(text.encode()) for text in TEXTS], NEW_TOKENS)
    drafts, *accepted = [b - a for a, b in zip(before, counts(), strict=True)]
    share = sum(accepted) / (3 * drafts)
    record_property("accepted_share", share)
    assert 0.2 < share < 0.8
    assert accepted[0] > accepted[1] > accepted[2] > 0
