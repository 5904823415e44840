"""The bytes that each token stands for, and the role of each special token: what two vocabularies are compared by.

Texts of single tokens do not serve: a token may be part of a character, and decoders strip spaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import BrokenModel
from paceline.text.detokenizer import BYTE_TOKEN, token_bytes
from paceline.text.tokenizer import Tokenizer

SPACE_MARK = "▁"  # a space, in SentencePiece's spelling
BEGIN_TEXT, END_TEXT, BEGIN_TURN, END_TURN = "begin text", "end text", "begin turn", "end turn"
# Spellings of special tokens in published tokenizers. They name a role; two special tokens are alike by role alone.
SPELLINGS = {
    BEGIN_TEXT: ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "[BOS]"),
    END_TEXT: ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]"),
    BEGIN_TURN: ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start|>"),
    END_TURN: ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"),
}
NAMED = {"bos_token": BEGIN_TEXT, "eos_token": END_TEXT}  # roles of special tokens of other spellings
PROBE = "The year's 1st test:\n  x = f(y) # naïve, 東京 🙂"  # in NFC


@dataclass(frozen=True)
class TokenBytes:
    """A vocabulary as bytes."""

    of: tuple[bytes | None, ...]  # by id; None: a special or unused token, which stands for no text
    roles: Mapping[str, int]  # role -> id of the special token

    @staticmethod
    def of_tokenizer(tokenizer: Tokenizer) -> TokenBytes:
        """Return the bytes of a tokenizer's tokens; raise BrokenModel where they do not spell its texts."""
        vocab, added = tokenizer.vocab(), tokenizer.backend.get_added_tokens_decoder()
        spell = token_bytes if tokenizer.vocab_kind() == "byte_level" else _with_space_marks
        of: list[bytes | None] = [spell(token) if token else None for token in vocab]
        for number, token in added.items():
            of[number] = None if token.special else token.content.encode()
        unknown = tokenizer.named_tokens.get("unk_token")
        if unknown in vocab:
            of[vocab.index(unknown)] = None
        spelt = b"".join(of[token] or b"" for token in tokenizer.encode(PROBE, add_special_tokens=False))
        if spelt.removeprefix(b" ") != PROBE.encode():
            raise BrokenModel("its tokenizer changes texts, or spells its tokens in an unknown way")
        return TokenBytes(tuple(of), _roles(tokenizer))


def _with_space_marks(token: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode()


def _roles(tokenizer: Tokenizer) -> dict[str, int]:
    special = tokenizer.backend.get_added_tokens_decoder()
    ids = {token.content: number for number, token in special.items() if token.special}
    named = {tokenizer.named_tokens.get(name): role for name, role in NAMED.items()}
    known = {spelling for spellings in SPELLINGS.values() for spelling in spellings}
    roles: dict[str, int] = {}
    for role, spellings in SPELLINGS.items():
        own = [text for text, of in named.items() if text is not None and of == role and text not in known]
        found = [ids[text] for text in (*own, *spellings) if text in ids]
        if found:
            roles[role] = found[0]
    return roles
