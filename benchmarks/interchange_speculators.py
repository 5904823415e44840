"""Writes an EAGLE-3 head by the speculators library's own classes, for `interchange.py`: random weights, the library's
`save_pretrained`, and the logits its own forward gives for random inputs.

    python interchange_speculators.py FOLDER            # by an interpreter that has speculators
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

VOCAB, DRAFTED, HIDDEN, LENGTH, TAPS = 120, 50, 64, 23, 3


def main(folder: Path) -> None:
    layer = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
    )
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFTED,
        norm_before_residual=True,
        fc_norm=True,
        norm_output=True,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    torch.manual_seed(0)
    model = Eagle3DraftModel(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1 if parameter.dim() < 2 else parameter.shape[1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * scale)
    ids = torch.randperm(VOCAB)[:DRAFTED].sort().values
    model.d2t.copy_(ids - torch.arange(DRAFTED))
    model.t2d[ids] = True
    model.save_pretrained(folder)
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, result: found.append(result))
    taps, tokens = torch.randn(1, LENGTH, TAPS * HIDDEN), torch.randint(0, VOCAB, (1, LENGTH))
    with torch.no_grad():
        model(taps, tokens, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=1)
    save_file({"taps": taps[0], "tokens": tokens[0], "logits": found[0][0].contiguous()}, folder / "expected.bin")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
