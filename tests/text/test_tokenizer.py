"""Tokenizers: the same tokens, chats and text as transformers gives, and a stream that adds up to the whole."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from paceline.errors import BrokenModel, InvalidPrompt, ModelNotFound, PacelineError, UnsupportedModel
from paceline.text.chat_template import ChatTemplate
from paceline.text.detokenizer import WindowStream
from paceline.text.gguf_vocab import PRE_TOKENIZERS, merges_from_scores, tokenizer_files
from paceline.text.tokenizer import Tokenizer, bpe_backend

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234567 o'clock, isn't it?",
    "def f(x):\n\treturn x ** 2  # naïve\n\n\n",
    "日本語のテキスト и русский текст, 😀😃 emoji 👩‍👩‍👧 families",
] * 3
TEXTS = [
    *CORPUS[:3],
    "",
    " leading and trailing  ",
    "<|user|>hello<|end|> <|user|>",
    "a\u0301 combining, \u200b zero width, \r\n windows",
    "1 22 333 4444 ½ ²",
    "🏳️‍🌈🇫🇷 \U0001f9d1\U0001f3fd",
]
SPECIALS = ["<|end|>", "<|user|>", "<|bot|>"]


@cache
def byte_level() -> Backend:
    """Byte-level BPE, as in Llama 3, Qwen and SmolLM."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("▁plain Ġ", special=False)])
    return backend


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    words = ["▁the", "▁quick", "th", "he", "the", "▁t", "ox", "fox", "▁fox", "qu", "ick", "▁▁", "▁qu", "ck", "ic"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,é日"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [-100.0 - i for i in range(len(letters))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters))
    return tokens, scores, types


@cache
def sentencepiece() -> Backend:
    """BPE with byte fallback, as in Llama 2 and Mistral."""
    tokens, scores, _ = sentencepiece_vocabulary()
    merges = [(left, right) for left, right in merges_from_scores(tokens, scores)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    frame = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.post_processor = frame
    return backend


@cache
def metaspace() -> Backend:
    """A decoder without a stream of its own."""
    backend = Backend(models.BPE({"▁": 0, "a": 1, "b": 2, "▁a": 3, "▁▁": 4}, [("▁", "a"), ("▁", "▁")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


BACKENDS = {"byte level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace}


def save(backend: Backend, folder: Path, **config: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | config)
    )
    return folder


def both(folder: Path) -> tuple[Tokenizer, Any]:
    from transformers import AutoTokenizer

    return Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)


# --- encoding and decoding

CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("byte level", {"eos_token": "<|end|>"}),
    ("byte level", {"eos_token": "<|end|>", "bos_token": "<|user|>", "add_bos_token": True}),
    ("byte level", {"eos_token": "<|end|>", "bos_token": "<|user|>", "add_bos_token": True, "add_eos_token": True}),
    ("byte level", {"eos_token": {"content": "<|end|>", "__type": "AddedToken"}, "add_bos_token": False}),
    ("byte level", {"pad_token": "<|pad|>", "additional_special_tokens": ["<|more|>", "<|end|>"]}),
    ("byte level", {"extra_special_tokens": ["<|extra|>"]}),
    ("sentencepiece", {"bos_token": "<s>", "eos_token": "</s>"}),
    ("sentencepiece", {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}),
]


@pytest.mark.parametrize(("kind", "config"), CONFIGS)
def test_tokens_are_those_of_transformers(kind: str, config: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = both(save(BACKENDS[kind](), tmp_path, **config))
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)
    for text in [*TEXTS, "a<|pad|>b<|more|><|extra|> c"]:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_added_tokens_of_the_config_get_their_ids(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    flags = {"single_word": False, "lstrip": False, "rstrip": True, "normalized": False}
    declared = {
        str(size): {"content": "<tool>", "special": False, **flags},
        str(size + 1): {"content": "<|late|>", "special": True, **flags},
    }
    ours, theirs = both(save(byte_level(), tmp_path, added_tokens_decoder=declared))
    text = "a<tool>  b<|late|> c"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.backend.token_to_id("<|late|>") == size + 1
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_a_folder_without_tokenizer_json_says_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(BrokenModel):
        Tokenizer.from_path(tmp_path)


ODD_CONFIGS: list[dict[str, Any]] = [
    {"eos_token": 5},
    {"eos_token": {"text": "<s>"}},
    {"bos_token": ["<s>"]},
    {"added_tokens_decoder": ["<s>"]},
    {"added_tokens_decoder": {"one": {"content": "<s>"}}},
    {"added_tokens_decoder": {"900": "<s>", "901": 7}},
    {"added_tokens_decoder": {"900": {"content": "<s>", "special": "false"}}},
    {"extra_special_tokens": "<s>"},
    {"additional_special_tokens": [None]},
    {"chat_template": 5},
    {"chat_template": [{"name": "default", "template": 5}]},
    {"chat_template": {"default": "x"}},
]


@pytest.mark.parametrize("config", ODD_CONFIGS)
def test_a_tokenizer_config_of_odd_types_names_the_key(config: dict[str, Any], tmp_path: Path) -> None:
    (key,) = config
    with pytest.raises(BrokenModel, match=rf"tokenizer_config\.json.*{key}"):
        Tokenizer.from_path(save(byte_level(), tmp_path, **config))


def test_a_tokenizer_config_nested_without_end_is_one_line(tmp_path: Path) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(BrokenModel):
        Tokenizer.from_path(tmp_path)


ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a loop in a macro": "{% macro m() %}{% for a in range(99999) %}{% endfor %}{% endmacro %}"
    "{% for b in range(99999) %}{{ m() }}{% endfor %}",
    "calls that double": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "a product": "{{ 'a' * 10 ** 12 }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_never_ends_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.text.chat_template.MAX_TURNS", 200_000)
    with pytest.raises(PacelineError):
        ChatTemplate(source).render([{"role": "user", "content": "Hi"}])


def test_loops_of_a_template_know_their_length_and_share_a_count_per_rendering(monkeypatch) -> None:
    monkeypatch.setattr("paceline.text.chat_template.MAX_TURNS", 6)
    source = "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ' ' }}{% endfor %}"
    template = ChatTemplate(source + "{% for a, b in pairs.items() if b %}{{ a }}{{ loop.revindex0 }}{% endfor %}")
    for _ in range(3):
        assert template.render([{"role": "x"}] * 2, pairs={"p": 1, "q": 0, "r": 2}) == "1/2 2/2.p1r0"
    with pytest.raises(PacelineError):
        template.render([{"role": "x"}] * 7, pairs={})


def test_special_tokens_may_be_named_in_a_file_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>", "bos_token": "<|new|>"}))
    ours, theirs = both(save(byte_level(), tmp_path))
    assert (ours.eos_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert ours.eos_token_id == 0


def test_truncation_and_padding_baked_into_the_file_are_off(tmp_path: Path) -> None:
    backend = Backend.from_str(byte_level().to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=100)
    assert len(Tokenizer.from_path(save(backend, tmp_path)).encode("a z a z a z a")) == 13


def test_single_tokens_have_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(save(byte_level(), tmp_path))
    (space_a,) = tokenizer.encode(" the"[:1])
    assert tokenizer.token_text(space_a) == " "
    assert tokenizer.token_text(0) == "<|end|>"
    assert tokenizer.token_text(tokenizer.backend.token_to_id("ð")) == "�"


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidPrompt):
        Tokenizer.from_path(save(byte_level(), tmp_path)).encode("\ud800")


def test_a_missing_or_damaged_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        Tokenizer.from_path(tmp_path / "none")
    with pytest.raises(BrokenModel) as caught:
        Tokenizer.from_path(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BrokenModel, match=r"tokenizer\.json"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(BrokenModel, match=r"tokenizer_config\.json"):
        Tokenizer.from_path(tmp_path)


# --- the stream


def assert_stream_adds_up(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    stream = tokenizer.incremental_decoder(skip_special_tokens=skip)
    text = "".join([stream.push(token) for token in ids]) + stream.flush()
    assert text == stream.decode(ids) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_any_tokens_stream_to_the_text_they_decode_to(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = Tokenizer(BACKENDS[kind](), {}, {})
    some = st.integers(0, tokenizer.vocab_size + 3)  # ids beyond the vocabulary decode to nothing
    emoji = st.sampled_from(tokenizer.encode("😀日本👩‍👩‍👧é", add_special_tokens=False))
    assert_stream_adds_up(tokenizer, data.draw(st.lists(some | emoji, max_size=40)), skip)


@given(text=st.text(max_size=60), skip=st.booleans())
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("kind", BACKENDS)
def test_any_text_streams_back(kind: str, text: str, skip: bool) -> None:
    tokenizer = Tokenizer(BACKENDS[kind](), {}, {})
    assert_stream_adds_up(tokenizer, tokenizer.encode(text), skip)


def test_the_real_vocabulary_streams(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.from_path(smollm2_path)

    @given(ids=st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60), skip=st.booleans())
    @settings(max_examples=200, deadline=None)
    def check(ids: list[int], skip: bool) -> None:
        assert_stream_adds_up(tokenizer, ids, skip)

    check()


def test_whole_characters_are_not_held_back_and_halves_are() -> None:
    tokenizer = Tokenizer(byte_level(), {}, {})
    stream = tokenizer.incremental_decoder()
    bytes_of_emoji = [tokenizer.backend.token_to_id(c) for c in "ðŁĺĤ"]  # 😂, byte by byte
    assert [stream.push(token) for token in bytes_of_emoji] == ["", "", "", "😂"]
    assert stream.push(bytes_of_emoji[0]) == ""
    assert stream.flush() == "�"
    assert stream.push(bytes_of_emoji[1]) == "�"  # after a flush it starts anew


def test_bytes_of_sentencepiece_wait_for_the_end_of_their_run() -> None:
    tokenizer = Tokenizer(sentencepiece(), {}, {})
    stream = tokenizer.incremental_decoder()
    run = [3 + byte for byte in "😂".encode()]
    letter = tokenizer.backend.token_to_id("▁the")
    assert [stream.push(token) for token in [letter, *run, letter]] == ["the", "", "", "", "", "😂 the"]


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_the_work_per_token_does_not_grow(kind: str) -> None:
    """The worst run there is: bytes that never become a character."""
    tokenizer = Tokenizer(BACKENDS[kind](), {}, {})
    byte = tokenizer.backend.token_to_id("ð" if kind == "byte level" else "<0xF0>")
    stream = tokenizer.incremental_decoder()
    pieces = [stream.push(byte) for _ in range(50_000)]
    assert "".join(pieces) + stream.flush() == "�" * 50_000


def test_a_decoder_we_do_not_know_still_streams() -> None:
    stream = WindowStream(lambda tokens: "".join(tokens).lstrip(" "))
    assert [stream.push(token) for token in (" a", " b", "�", "c")] == ["a", " b", "", "�c"]
    stream.push("�")
    assert stream.flush() == "�"


# --- chat templates

CHATML = (
    "{% for message in messages %}{{ '<|user|>' + message['role'] + '\n' + message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|bot|>' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "variables": "{{ bos_token }}{{ messages[0].content | trim }}{{ eos_token }}{{ missing }}{{ mood }}",
    "white space": "{% if true %}\n    {% for m in messages %}\n  {{ m.content }}\n  {% endfor %}\n{% endif %}\n",
    "tools": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% if documents is none %}none{% endif %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}",
    "date": "{{ strftime_now('%Y') }}",
}
CHAT = [
    {"role": "system", "content": "Be  brief."},
    {"role": "user", "content": " <b>Hi</b> & 'bye' \n"},
    {"role": "assistant", "content": "日本 😀"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {}}}]


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str, generation_prompt: bool, tmp_path: Path) -> None:
    config = {"bos_token": "<|user|>", "eos_token": "<|end|>", "chat_template": TEMPLATES[name]}
    ours, theirs = both(save(byte_level(), tmp_path, **config))
    options: dict[str, Any] = {"add_generation_prompt": generation_prompt, "tools": TOOLS, "mood": "calm"}
    text = theirs.apply_chat_template(CHAT, tokenize=False, **options)
    assert ours.render_chat(CHAT, **options) == text
    assert ours.apply_chat_template(CHAT, **options) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("content", ["日本 😀", "It is ", " spaced\n", "Hi", "bye"])
@pytest.mark.parametrize("name", ["chatml", "variables", "white space"])
def test_a_message_is_left_open_as_in_transformers(name: str, content: str, tmp_path: Path) -> None:
    template = TEMPLATES[name] if name != "variables" else CHATML.replace("message['content']", "message.content|trim")
    ours, theirs = both(save(byte_level(), tmp_path, eos_token="<|end|>", chat_template=template))
    chat = [*CHAT[:2], {"role": "assistant", "content": content}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    text = theirs.apply_chat_template(chat, tokenize=False, **options)
    assert ours.render_chat(chat, **options) == text
    assert ours.apply_chat_template(chat, **options) == theirs.encode(text, add_special_tokens=False)


def test_a_template_file_outranks_the_config(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path, chat_template="config")
    assert Tokenizer.from_path(folder).render_chat(CHAT) == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_path(folder).render_chat(CHAT) == "file"


def test_named_templates_are_chosen_by_what_is_asked(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer.from_path(save(byte_level(), tmp_path, chat_template=named))
    assert tokenizer.render_chat(CHAT) == "plain"
    assert tokenizer.render_chat(CHAT, tools=TOOLS) == "tools"


def test_without_a_template_the_error_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(save(byte_level(), tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(PacelineError):
        tokenizer.apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", ""),
        ("{{ messages[9].content.x }}", ""),
        ("{% if %}", ""),
        ("{{ ''.__class__.__mro__ }}", ""),
    ],
)
def test_a_template_that_raises_is_one_line(template: str, reason: str) -> None:
    with pytest.raises(PacelineError) as caught:
        ChatTemplate(template).render(CHAT)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("messages", [[], ["hi"], [{"content": "hi"}]])
def test_messages_of_the_wrong_form_are_refused(messages: list[Any], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(save(byte_level(), tmp_path, chat_template=CHATML))
    with pytest.raises(InvalidPrompt):
        tokenizer.apply_chat_template(messages)


# --- from GGUF


def ggml(backend: Backend, pre: str) -> dict[str, Any]:
    """The metadata llama.cpp's converter would write for a byte-level BPE."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    types = [3 if token in SPECIALS else 4 if token.startswith("▁plain") else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": CHATML,
    }


def from_metadata(metadata: dict[str, Any]) -> Tokenizer:
    body, config = tokenizer_files(metadata, "test.gguf")
    backend = bpe_backend(body)
    assert backend.to_str() == Backend.from_str(json.dumps(body)).to_str()
    return Tokenizer(backend, config, {"default": config.get("chat_template", "")})


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """How the text is cut before merging, written with spaces as they are."""
    cut = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in cut]


def test_a_gguf_vocabulary_gives_the_tokenizer_it_was_made_from() -> None:
    original, rebuilt = Tokenizer(byte_level(), {}, {}), from_metadata(ggml(byte_level(), "gpt-2"))
    for text in TEXTS:
        assert rebuilt.encode(text) == original.encode(text)
        assert rebuilt.decode(rebuilt.encode(text)) == original.decode(original.encode(text))
    assert rebuilt.eos_token_id == 0
    assert rebuilt.render_chat(CHAT).endswith("<|bot|>")


def test_the_pretokenizers_are_those_of_the_models() -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert PRE_TOKENIZERS["qwen2"][0]["pattern"]["Regex"] == PRETOKENIZE_REGEX
    assert PRE_TOKENIZERS["llama-bpe"][0]["pattern"]["Regex"] == TikTokenConverter().pattern


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["It", "'s", " 12345", "...", " ok", "\n", "\n", "x"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", "...", " ok", "\n", "\n", "x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", "...", " ok", "\n\n", "x"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", "...", " ok", "\n\n", "x"]),
        ("default", ["It", "'", "s", " ", "123", "45", "...", " ok", "\n", "\n", "x"]),
    ],
)
def test_each_pretokenizer_cuts_as_its_model_does(pre: str, expected: list[str]) -> None:
    assert pieces(from_metadata(ggml(byte_level(), pre)), "It's 12345... ok\n\nx") == expected


def test_beginning_and_end_are_added_where_the_file_says_so() -> None:
    metadata = ggml(byte_level(), "llama-bpe")
    plain = from_metadata(metadata).encode("hi")
    both_ends = from_metadata(metadata | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    assert both_ends.encode("hi") == [1, *plain, 0]
    assert both_ends.encode("hi", add_special_tokens=False) == plain


def test_a_sentencepiece_vocabulary_gives_the_tokenizer_it_was_made_from() -> None:
    tokens, scores, types = sentencepiece_vocabulary()
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    original, rebuilt = Tokenizer(sentencepiece(), {}, {}), from_metadata(metadata)
    for text in [*TEXTS, "the quick fox", "  the é日本 😀"]:
        ids = rebuilt.encode(text)
        assert ids == original.encode(text)
        assert ids[0] == 1
        assert rebuilt.decode(ids) == original.decode(ids)
    bare = from_metadata(metadata | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    assert bare.decode(bare.encode(" the fox")) == " the fox"


def test_the_best_score_merges_first_as_in_sentencepiece() -> None:
    tokens, scores, _ = sentencepiece_vocabulary()
    merges = merges_from_scores(tokens, scores)
    assert merges[0] == ["▁t", "he"]  # ▁the has the best score; of its splits the longer left part comes first
    assert [left + right for left, right in merges].index("th") > [left + right for left, right in merges].index("▁the")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModel),
        ({"tokenizer.ggml.pre": "tekken"}, UnsupportedModel),
        ({"tokenizer.ggml.tokens": None}, BrokenModel),
        ({"tokenizer.ggml.merges": None}, BrokenModel),
        ({"tokenizer.ggml.model": "llama"}, BrokenModel),
    ],
)
def test_other_vocabularies_are_refused(change: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        tokenizer_files(ggml(byte_level(), "gpt-2") | change, "test.gguf")
