"""Prompts and chats to ids, and the text of a request while it grows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_gguf import TEMPLATE, TOKENS, sentencepiece, vocabulary
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from specflow.errors import RequestError
from specflow.target.gguf_tokenizer import GgufVocabulary, build_tokenizer
from specflow.text import TextCodec


def codec(made: GgufVocabulary | None = None) -> TextCodec:
    made = made or vocabulary()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(made),
        bos_token=made.token("bos"),
        eos_token=made.token("eos"),
        chat_template=made.chat_template,
    )
    return TextCodec(tokenizer, (2,), "tiny")


BYTE_LEVEL = codec()
SPIECE = codec(sentencepiece())


@given(ids=st.lists(st.integers(0, len(TOKENS) - 1), max_size=24), cut=st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_streamed_pieces_join_to_the_decoded_text(ids: list[int], cut: int) -> None:
    stream = BYTE_LEVEL.stream()
    pieces = [stream.push(ids[start : start + cut]) for start in range(0, len(ids), cut)]
    assert "".join(pieces) + stream.flush() == BYTE_LEVEL.decode(ids)


@given(ids=st.lists(st.one_of(st.integers(0, 269), st.integers(125, 258)), max_size=24), cut=st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_raw_bytes_never_change_text_already_given(ids: list[int], cut: int) -> None:
    stream = SPIECE.stream()
    pieces = [stream.push(ids[start : start + cut]) for start in range(0, len(ids), cut)]
    assert "".join(pieces) + stream.flush() == SPIECE.decode(ids)


def test_a_character_of_several_tokens_comes_whole() -> None:
    ids = BYTE_LEVEL.encode("a€b")
    assert len(ids) == 5
    stream = BYTE_LEVEL.stream()
    assert [stream.push([token]) for token in ids] == ["a", "", "", "€", "b"]
    assert stream.flush() == ""


def test_flush_gives_an_unfinished_character_once() -> None:
    stream = BYTE_LEVEL.stream()
    assert stream.push(BYTE_LEVEL.encode("a€")[:-1]) == "a"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_text_comes_at_once_and_without_special_tokens() -> None:
    stream = BYTE_LEVEL.stream()
    hello, end = TOKENS.index("hello"), 2
    assert [stream.push([hello]), stream.push([end]), stream.push([hello])] == ["hello", "", "hello"]
    assert BYTE_LEVEL.decode([hello, end]) == "hello"


def llama_like() -> TextCodec:
    """A tokenizer with the decoder of Llama 2 and Mistral: unknown characters fall back to raw bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    model = models.BPE(
        vocab={word: index for index, word in enumerate(words)},
        merges=[("▁", "a"), ("▁", "b")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    return TextCodec(wrapped, (2,), "llama-like")


LLAMA = llama_like()


@given(ids=st.lists(st.one_of(st.integers(0, 263), st.integers(125, 263)), max_size=24), cut=st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_byte_fallback_pieces_join_to_the_decoded_text(ids: list[int], cut: int) -> None:
    stream, text = LLAMA.stream(), ""
    for start in range(0, len(ids), cut):
        text += stream.push(ids[start : start + cut])
        if peeked := stream.peek():
            assert text + peeked == LLAMA.decode(ids[: start + cut])
    assert text + stream.flush() == LLAMA.decode(ids)


def test_peek_shows_raw_bytes_that_are_whole_characters_and_keeps_them() -> None:
    ids = LLAMA.encode("a\n€b")
    assert len(ids) == 6  # raw bytes: one for the line end, three for the euro sign
    stream = LLAMA.stream()
    seen = [(stream.push([token]), stream.peek()) for token in ids]
    assert seen == [("a", ""), ("", "\n"), ("", ""), ("", ""), ("", "\n€"), ("\n€b", "")]
    assert (stream.peek(), stream.flush()) == ("", "")


def test_peek_at_the_end_is_what_flush_gives() -> None:
    stream = LLAMA.stream()
    stream.push(LLAMA.encode("a \n"))
    assert [stream.peek(), stream.peek(), stream.flush(), stream.peek()] == ["\n", "\n", "\n", ""]


def test_peek_never_shows_part_of_a_character() -> None:
    stream = BYTE_LEVEL.stream()
    stream.push(BYTE_LEVEL.encode("a€")[:-1])
    assert stream.peek() == ""


def test_a_stream_remembers_no_more_than_its_last_piece() -> None:
    stream = BYTE_LEVEL.stream()
    for _ in range(500):
        stream.push(BYTE_LEVEL.encode("hello"))
    assert len(stream._before) + len(stream._held) <= 2


def test_two_streams_do_not_mix() -> None:
    ids = BYTE_LEVEL.encode("€")
    first, second = BYTE_LEVEL.stream(), BYTE_LEVEL.stream()
    assert [first.push(ids[:2]), second.push([TOKENS.index("hello")]), first.push(ids[2:])] == ["", "hello", "€"]


def test_a_plain_prompt_gets_the_special_tokens_of_its_model() -> None:
    assert codec(vocabulary(add_bos=True)).encode("hello") == [1, TOKENS.index("hello")]
    assert BYTE_LEVEL.encode("hello") == [TOKENS.index("hello")]


def test_a_chat_gets_special_tokens_from_its_template_alone() -> None:
    made = codec(vocabulary(add_bos=True))
    ids = made.encode_chat([{"role": "user", "content": "hello"}])
    assert ids.count(1) == 2  # one for the turn, one for the answer
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert made.render_chat([{"role": "user", "content": "hello"}]) == text
    assert ids[-1] == TOKENS.index("Ċ")


def test_template_options_reach_the_template() -> None:
    made = codec(vocabulary(chat_template=TEMPLATE + "{% if think %}<think>{% endif %}"))
    turns = [{"role": "user", "content": "hello"}]
    assert made.render_chat(turns, {"think": True}) == made.render_chat(turns) + "<think>"


@pytest.mark.parametrize("prompt", ["", "\ud800", 7, None, ["hello"]])
def test_prompts_that_are_no_text_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        BYTE_LEVEL.encode(prompt)


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ({"role": "user", "content": "hello"}, "messages"),
        ([{"role": "user", "content": "hello"}, {"content": "hello"}], r"messages\[1\]"),
        ([{"role": "user"}], r"messages\[0\]"),
        ([{"role": "user", "content": ""}], "only empty turns"),
        ([{"role": "robot", "content": "hello"}], "no robots"),
        ([{"role": "user", "content": ["hello"]}], "chat template of tiny refuses"),
    ],
)
def test_malformed_chats_are_refused_and_located(messages: Any, where: str) -> None:
    with pytest.raises(RequestError, match=where):
        BYTE_LEVEL.encode_chat(messages)


def test_a_model_without_chat_template_says_so() -> None:
    made = codec(vocabulary(chat_template=None))
    assert not made.has_chat_template
    with pytest.raises(RequestError, match="tiny has no chat template"):
        made.encode_chat([{"role": "user", "content": "hello"}])


def test_vocabulary_size_counts_added_tokens() -> None:
    assert BYTE_LEVEL.vocab_size == len(TOKENS)
