"""Writes a drafter's folder in the layout of another engine, or refuses by name what that engine's class lacks.

The classes are vLLM's (0.32): an exported folder holds nothing they would ignore. Formats: `eagle3` is the layout its
authors publish, `speculators` the library's (EAGLE-3 and block drafters), `medusa` and `dspark` those of one method.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from paceline.drafters.block import checkpoint as dspark_checkpoint
from paceline.drafters.block.config import W1, described
from paceline.drafters.eagle import checkpoint as eagle_checkpoint
from paceline.drafters.folder import CONFIG, draft_ids, in_draft_vocabulary, read_config, write_folder, write_json
from paceline.drafters.heads import checkpoint as medusa_checkpoint
from paceline.drafters.methods import DFLASH, DSPARK, EAGLE, EAGLE3, MEDUSA, METHODS
from paceline.errors import BrokenModel, InvalidParameter, UnsupportedModel
from paceline.models.load.hub import resolve
from paceline.models.load.loader import load_config, load_weights
from paceline.models.spec import ModelConfig
from paceline.training.names import FORMATS, SPECULATORS
from paceline.training.output_folder import occupied


class ExportTarget(NamedTuple):
    """The model a drafter was trained for."""

    name: str
    config: ModelConfig
    head: Callable[[], Tensor]  # (V, H) read when asked for


def target_of(name: str) -> ExportTarget:
    path = resolve(name)
    config = load_config(path)
    weights = load_weights(path, config)
    rows = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return ExportTarget(name, config, lambda: weights[rows].numbers())


def export(folder: Path, form: str, out: Path, target: ExportTarget | None = None) -> str:
    """The method of the drafter that was written. `target` is needed for what a folder leaves to its model."""
    if form not in FORMATS:
        raise InvalidParameter("format", f"{form!r} is not one of {', '.join(FORMATS)}")
    if occupied(out):
        raise InvalidParameter("out", f"{out} is there already; choose a folder that does not exist or is empty")
    method = method_of(folder)
    if method not in FORMATS[form]:
        possible = [name for name, methods in FORMATS.items() if method in methods]
        advice = f"export it as {' or '.join(possible)}" if possible else "other engines read its folder as it is"
        raise InvalidParameter("format", f"{folder} holds a drafter of method {method}, which {form} lacks; {advice}")
    there = out.exists()
    try:
        _WRITERS[method](folder, form, out, target)
    except (OSError, SafetensorError) as error:
        if not there:
            shutil.rmtree(out, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise InvalidParameter("out", f"cannot write to {out}: {reason}; free some space or choose another") from error
    return method


def method_of(folder: Path) -> str:
    """Found from the files."""
    raw = read_config(folder)
    found = eagle_checkpoint.recognise(folder)
    if found is not None:
        return found
    for method in METHODS.values():
        if method.recognise is not None and method.recognise(raw):
            return method.name
    raise BrokenModel(f"{folder} holds no drafter that is known here")


def _eagle3(folder: Path, form: str, out: Path, target: ExportTarget | None) -> None:
    config, tensors = eagle_checkpoint.read(folder, None if target is None else target.config)
    _refuse(
        folder,
        form,
        {
            "norms of q and k (write speculators instead)": config.body.qk_norm and form != SPECULATORS,
            "a bias of fc": "fc" in config.biases,
            "a bias of the MLP": any("mlp" in name for name in config.biases),
            "both norm_before_fc and fc_norm": config.norm_before_fc and config.fc_norm,
        },
    )
    if target is not None:
        config = replace(config, layer_ids=config.taps(target.config.num_layers))
        config = replace(config, target=replace(config.target, name=config.target.name or target.name))
    if not config.own_head and config.vocab < config.body.vocab_size:
        config = replace(config, own_head=True)
        tensors = {**tensors, "lm_head.weight": _rows(folder, tensors["d2t"], target)}
    if form == SPECULATORS and not config.target.name:
        raise InvalidParameter("model", f"{form} names the model a drafter is for, and {folder} does not; give --model")
    eagle_checkpoint.write(out, config, tensors, speculators=form == SPECULATORS)


def _block(folder: Path, form: str, out: Path, target: ExportTarget | None) -> None:
    config, tensors = dspark_checkpoint.read(folder)
    _refuse(
        folder,
        form,
        {
            "a norm for each tap before fc (tap_norm)": config.tap_norm,
            "an embedding for each mask (mask_embedding)": config.mask_embedding,
            "attention without norms of q and k": not config.body.qk_norm,
            "masks without a token of the vocabulary (mask_token_id)": config.mask_token_id is None,
        },
    )
    if target is not None:
        config = replace(config, target=replace(config.target, name=config.target.name or target.name))
    if not config.target.name:
        raise InvalidParameter("model", f"{form} names the model a drafter is for, and {folder} does not; give --model")
    written = dict(tensors)
    if "d2t" in tensors:
        written["t2d"] = in_draft_vocabulary(tensors["d2t"], config.body.vocab_size)
        written["lm_head.weight"] = _rows(folder, tensors["d2t"], target)
        if config.markov_over_draft_vocab:
            written[W1] = tensors[W1].new_zeros(config.body.vocab_size, config.markov_rank)
            written[W1][draft_ids(tensors["d2t"])] = tensors[W1]
    description = described(replace(config, markov_over_draft_vocab=False))
    write_folder(out, description | {"use_aux_hidden_state": True}, written)


def _medusa(folder: Path, form: str, out: Path, target: ExportTarget | None) -> None:
    if target is None:
        raise InvalidParameter("model", f"{form} states the model's sizes, and {folder} does not; give --model")
    heads = medusa_checkpoint.load_heads(folder, target.config)
    biased = [bias is not None for head in heads for _, bias in head.blocks]
    _refuse(folder, form, {"a bias in some blocks and not in others": any(biased) and not all(biased)})
    if any(head.output is None for head in heads):
        shared = target.head()
        heads = [head if head.output is not None else head._replace(output=shared.clone()) for head in heads]
    medusa_checkpoint.save_heads(out, heads, target.name)
    keys = {
        "architectures": ["MedusaModel"],
        "model_type": form,
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
        "medusa_fc_bias": any(biased),
    }
    write_json(out / CONFIG, read_config(out) | keys)


_WRITERS: Mapping[str, Callable[[Path, str, Path, ExportTarget | None], None]] = {
    EAGLE3: _eagle3,
    DSPARK: _block,
    DFLASH: _block,
    MEDUSA: _medusa,
}
assert EAGLE not in _WRITERS, "other engines read EAGLE-1 folders as they are"


def _refuse(folder: Path, form: str, features: Mapping[str, bool]) -> None:
    for name, has in features.items():
        if has:
            raise UnsupportedModel(f"{folder} cannot be exported as {form}: vLLM's class has no place for {name}")


def _rows(folder: Path, offsets: Tensor, target: ExportTarget | None) -> Tensor:
    """The rows of the model's head for the draft vocabulary."""
    if target is None:
        raise InvalidParameter("model", f"{folder} takes its output head from its model; give --model")
    return target.head()[draft_ids(offsets)].contiguous()
