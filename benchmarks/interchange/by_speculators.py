"""Drafters written by the speculators library's own classes, for `interchange.py`: an EAGLE-3 and a DSpark head of
random weights, saved by the library's `save_pretrained`, with what its own forward gives for random inputs.

    python by_speculators.py FOLDER            # by an interpreter that has speculators
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

VOCAB, DRAFTED, HIDDEN, LENGTH, TAPS, BLOCK = 120, 50, 64, 23, 3, 5
SIZES = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "rms_norm_eps": 1e-5}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}


def about(algorithm: str) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def randomised(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1 if parameter.dim() < 2 else parameter.shape[1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * scale)
    ids = torch.randperm(VOCAB)[:DRAFTED].sort().values
    model.d2t.copy_(ids - torch.arange(DRAFTED))
    model.t2d[ids] = True
    model.lm_head.weight.data = model.embed_tokens.weight.data[ids].clone()  # same as a target that ties them
    return model


def write_eagle3(folder: Path) -> None:
    layer = LlamaConfig(num_hidden_layers=1, **SIZES)
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFTED,
        norm_before_residual=True,
        fc_norm=True,
        norm_output=True,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=about("eagle3"),
    )
    model = randomised(Eagle3DraftModel(config).float().eval())
    model.save_pretrained(folder)
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, result: found.append(result))
    taps, tokens = torch.randn(1, LENGTH, TAPS * HIDDEN), torch.randint(0, VOCAB, (1, LENGTH))
    with torch.no_grad():
        model(taps, tokens, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=1)
    save_file({"taps": taps[0], "tokens": tokens[0], "logits": found[0][0].contiguous()}, folder / "expected.bin")


@torch.no_grad()
def write_dspark(folder: Path) -> None:
    layer = Qwen3Config(num_hidden_layers=2, **SIZES)
    layer._attn_implementation = "eager"
    config = DSparkSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFTED,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[1, 2, 3],
        mask_token_id=7,
        sample_from_anchor=True,
        markov_rank=8,
        speculators_config=about("dspark"),
    )
    model = randomised(DSparkDraftModel(config).float().eval())
    model.save_pretrained(folder)
    taps, tokens = torch.randn(1, LENGTH, TAPS * HIDDEN), torch.randint(0, VOCAB, (1, LENGTH))
    anchors, chains = [], []
    for first in range(3, LENGTH - BLOCK):
        mask = torch.zeros(1, LENGTH)
        mask[0, first : first + BLOCK] = 1
        unused = torch.zeros(1, LENGTH, HIDDEN), torch.zeros(1, LENGTH, dtype=torch.long)
        _, logits, _, _, block = model._backbone_forward(taps, tokens, mask, *unused, max_anchors=1)
        previous, chain = tokens[0, block[0]], []
        for position in range(BLOCK):
            bias = model.markov_head.block_bias(prev_token_ids=previous.view(1, 1), hidden_states=None)[0, 0]
            best = (logits[0, position] + bias).argmax()
            previous = best + model.d2t[best]
            chain.append(int(previous))
        anchors.append(int(block[0]))
        chains.append(chain)
    expected = {"taps": taps[0], "tokens": tokens[0], "anchors": torch.tensor(anchors), "chains": torch.tensor(chains)}
    save_file({**expected, "embedding": model.embed_tokens.weight.data.clone()}, folder / "expected.bin")


if __name__ == "__main__":
    torch.manual_seed(0)
    write_eagle3(Path(sys.argv[1]) / "eagle3")
    write_dspark(Path(sys.argv[1]) / "dspark")
