"""Tokenizers of every kind that two vocabularies are compared by, trained on a few lines."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from paceline.text.gguf_vocab import LLAMA3_PATTERN
from paceline.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234567 o'clock, isn't it?\n\n  And so on.",
    "def f(x):\n\treturn x ** 2  # naïve\n\n\nclass Cache:\n    def get(self, key):\n        return self.cache[key]\n",
    "日本語のテキスト и русский текст, 😀😃 emoji 👩‍👩‍👧 families שלום العربية",
] * 3
TORTURE = (
    "Hello  world!\n\n  def f(x):\n\treturn x**2  # naïve café ñ\n 123456 don't we'll 🙂👨‍👩‍👧‍👦 e\u0301\u0323 שלום "
    "العربية 東京都は日本の首都です。한국어 ไทย\r\n\r\n   end  \n a\n\n\n b <|im_end|> and <s> </s>\x00\x07 🇩🇪 tail   "
)
CHAT = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>"]


def _byte_level(pattern: str | None, size: int, specials: list[str]) -> Backend:
    backend = Backend(models.BPE())
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, own])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<plain> Ġ", special=False)])
    return backend


def _with_space_marks(specials: list[str], prepends: bool) -> Backend:
    alphabet = sorted({letter for text in CORPUS[:2] for letter in text if letter.isascii() and letter not in " \n\t"})
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    marks = [normalizers.Prepend("▁")] if prepends else []
    backend.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prepends else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    tokens = ["<unk>", *specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("i", "n"), ("▁", "▁"), ("r", "e"), ("t", "h"), ("▁", "f")]
    tokens += ["▁", *alphabet, *(left + right for left, right in words)]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    backend.model = models.BPE(vocab, words, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    backend.add_special_tokens(["<unk>", *specials])
    return backend


@cache
def small_tokenizers() -> dict[str, Tokenizer]:
    """Return the tokenizers by name. Nobody may change them but to make them blind to special tokens."""
    kinds = {
        "byte level": (_byte_level(None, 420, CHAT), {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}),
        "llama": (_byte_level(LLAMA3_PATTERN, 480, LLAMA), {"eos_token": "<|eot_id|>"}),
        "sentencepiece": (_with_space_marks(["<s>", "</s>"], True), {"bos_token": "<s>", "eos_token": "</s>"}),
        "gemma": (_with_space_marks(["<bos>", "<eos>", "<end_of_turn>"], False), {"eos_token": "<eos>"}),
    }
    made = {
        name: Tokenizer(backend, config | {"unk_token": "<unk>"} if "▁" in backend.get_vocab() else config, {})
        for name, (backend, config) in kinds.items()
    }
    for tokenizer in made.values():
        tokenizer.backend.encode_special_tokens = True
    return made
