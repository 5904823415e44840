"""The decoder against transformers, for every architecture, beyond sliding windows and original RoPE contexts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import transformers

from paceline.models.decoder import FINAL, LEAST_POSITIONS
from paceline.models.kv_cache import KVCache
from paceline.models.load.loader import load_config, load_weights
from paceline.models.load.open_model import load_model
from paceline.models.plan import PassPlan
from paceline.models.rope import rope_tables
from paceline.models.weights import WeightKind
from paceline.testing import logits_of
from tests.helpers.tiny import TINY, save_tiny

LENGTH = 90  # beyond every window (16) and original context (32) below


@pytest.fixture(scope="module", params=sorted(TINY))
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    oracle = save_tiny(request.param, folder)
    loaded = load_model(folder, dtype="float32", device="cpu")
    tokens = random.Random(3).choices(range(oracle.config.vocab_size), k=LENGTH)
    return oracle, loaded.decoder, tokens


def test_logits_equal_transformers(tiny):
    oracle, decoder, tokens = tiny
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    logits = logits_of(decoder, tokens, [LENGTH])
    assert expected.std() > 1.0, "the oracle's logits are too flat to tell anything"
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_prefill_in_one_piece_in_chunks_and_token_by_token_are_the_same_bits(tiny):
    _, decoder, tokens = tiny
    whole = logits_of(decoder, tokens, [LENGTH])
    assert decoder.kernels.exact
    assert torch.equal(whole, logits_of(decoder, tokens, [7] * 12 + [6]))
    assert torch.equal(whole, logits_of(decoder, tokens, [1] * LENGTH))


def test_taps_are_the_hidden_states_transformers_reports(tiny):
    oracle, decoder, tokens = tiny
    with torch.no_grad():
        hidden = oracle(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    taps = (*range(decoder.config.num_layers), FINAL)  # transformers' last entry is after the final norm
    assert torch.equal(*final_and_head(decoder, tokens)), "FINAL is the head's input"
    captured = []

    class Tapped:
        def __getattr__(self, name):
            return getattr(decoder, name)

        def forward(self, tokens, plan, caches, logit_rows):
            output = decoder.forward(tokens, plan, caches, logit_rows, taps)
            captured.append(output.taps)
            return output

    plain = logits_of(decoder, tokens, [40, 50])
    assert torch.equal(plain, logits_of(Tapped(), tokens, [40, 50])), "tapping changes nothing"
    ours = torch.cat(captured)
    for column, expected in enumerate(hidden):
        torch.testing.assert_close(ours[:, column], expected[0], atol=1e-4, rtol=1e-4)


def final_and_head(decoder, tokens):
    """Logits, and the head's product of the final taps."""
    cache = KVCache(decoder.kv_specs, num_blocks=1, block_size=LENGTH, dtype=torch.float32, device=decoder.device)
    at, tables = torch.arange(LENGTH), torch.zeros(1, 1, dtype=torch.int32)
    plan = PassPlan.in_order(at, at, torch.zeros_like(at), tables, LENGTH, LENGTH)
    output = decoder.forward(torch.tensor(tokens), plan, cache.layers, at, (FINAL,))
    return output.logits, decoder.logits(output.taps[:, 0].contiguous())


def test_a_pass_from_hidden_states_gives_what_a_pass_from_their_tokens_gives(tiny):
    _, decoder, tokens = tiny
    plain = logits_of(decoder, tokens, [40, 50])

    class FromHidden:
        def __getattr__(self, name):
            return getattr(decoder, name)

        def forward(self, tokens, plan, caches, logit_rows):
            hidden = decoder.embed(tokens)
            before = hidden.clone()
            output = decoder.forward(hidden, plan, caches, logit_rows)
            assert torch.equal(hidden, before), "the caller's hidden states are not changed"
            return output

    assert torch.equal(plain, logits_of(FromHidden(), tokens, [40, 50]))


def forty(decoder, tokens, logit_rows, taps=()):
    """A pass over 40 tokens in blocks that lie apart: its output, and the last layer's K."""
    cache = KVCache(decoder.kv_specs, num_blocks=4, block_size=16, dtype=decoder.cache_dtype, device=decoder.device)
    positions, tables = torch.arange(40), torch.tensor([[2, 0, 3]], dtype=torch.int32)
    slots = tables[0].repeat_interleave(16)[:40] * 16 + positions % 16
    plan = PassPlan.in_order(positions, slots, torch.zeros_like(positions), tables, 16, 40)
    rows = torch.tensor(list(logit_rows), dtype=torch.int64)
    with torch.inference_mode():
        made = decoder.forward(torch.tensor(tokens[:40]), plan, cache.layers, rows, taps)
    return made.logits, made.taps, cache.layers[-1].k[slots]


@pytest.mark.parametrize("chosen", [range(40), (0, 7, 39), (39,), ()])
def test_a_pass_in_one_native_call_has_the_bits_of_several_calls(tiny, chosen, monkeypatch):
    _, decoder, tokens = tiny
    assert decoder._native is not None
    taps = (0, decoder.config.num_layers - 1)
    whole = forty(decoder, tokens, chosen, taps)
    monkeypatch.setattr(decoder, "_native", None)
    assert all(map(torch.equal, whole, forty(decoder, tokens, chosen, taps)))


@pytest.mark.parametrize("rows", [[3, 0], [0, 0, 1], [39, 40], [-1, 2]])
def test_rows_of_logits_that_are_not_ascending_rows_of_the_pass_are_refused(tiny, rows):
    _, decoder, tokens = tiny
    with pytest.raises(IndexError, match="ascending"):
        forty(decoder, tokens, rows)


def test_bf16_weights_in_the_file_give_what_transformers_computes_from_them_in_fp32(tmp_path):
    save_tiny("llama3-untied", tmp_path, dtype=torch.bfloat16)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    loaded = load_model(tmp_path, device="cpu")
    assert loaded.kind is WeightKind.BFLOAT16, "auto keeps what is in the file"
    tokens = random.Random(4).choices(range(oracle.config.vocab_size), k=40)
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits_of(loaded.decoder, tokens, [40]), expected, atol=1e-4, rtol=1e-4)


def test_rotary_tables_grow_with_the_passes_and_keep_their_bits(tmp_path, monkeypatch):
    """Also where a config promises 10**8 positions, which took 5 GB for a model of 3 MB."""
    save_tiny("llama3-untied", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 10**8}))
    decoder = load_model(tmp_path, dtype="float32", device="cpu").decoder
    tokens = random.Random(5).choices(range(decoder.config.vocab_size), k=LENGTH)
    whole = logits_of(decoder, tokens, [LENGTH])
    assert decoder.shape(1).positions == LEAST_POSITIONS
    monkeypatch.setattr("paceline.models.decoder.LEAST_POSITIONS", 8)
    grown = load_model(tmp_path, dtype="float32", device="cpu").decoder
    assert torch.equal(logits_of(grown, tokens, [7] * 12 + [6]), whole)
    assert grown.shape(1).positions == 128
    longest = rope_tables(decoder.config.layer.rope, decoder.config.layer.head_dim, 5000, decoder.device)
    for length in (1, 8, 100, 1001, 4096):
        tables = rope_tables(decoder.config.layer.rope, decoder.config.layer.head_dim, length, decoder.device)
        assert all(torch.equal(one, full[:length]) for one, full in zip(tables, longest, strict=True))


def test_smollm2_logits_equal_those_of_transformers(smollm2):
    """Greedy, fp32, token for token, through two very different implementations."""
    from paceline import SamplingParams

    config = transformers.AutoConfig.from_pretrained(smollm2.name)
    oracle = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    stored = load_weights(Path(smollm2.name), load_config(Path(smollm2.name)))
    oracle.load_state_dict({name: weight.numbers().float() for name, weight in stored.items()}, strict=False)
    oracle.tie_weights()
    prompts = [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "user", "content": "Write a Python function that adds two numbers."}],
        [{"role": "user", "content": "List three colours and say why you like each."}],
    ]
    ours = smollm2.chat(prompts, SamplingParams(temperature=0, max_tokens=24))
    for output in ours:
        ids = torch.tensor([output.prompt_token_ids])
        theirs = oracle.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        assert output.outputs[0].token_ids == theirs[0, ids.shape[1] :].tolist()
