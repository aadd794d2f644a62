"""Between text and token ids: prompts, chats, and the text of a request while it grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specflow.errors import RequestError

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

__all__ = ["TextCodec", "TextStream"]

_BROKEN = "\ufffd"
"""What decoders show for bytes that are no character."""


class TextCodec:
    """Tokenizer, chat template and stop ids of one model.

    Args:
        tokenizer: A transformers tokenizer with a fast (`tokenizers`) backend.
        stop_ids: Ids that end a text, as the model's generation config says.
        name: The model's name, for errors.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: tuple[int, ...], name: str) -> None:
        self._tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self.stop_ids = stop_ids
        self.name = name
        added = self._backend.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        names = (f"<0x{byte:02X}>" for byte in range(256))
        self._raw_bytes = frozenset(token for token in map(self._backend.token_to_id, names) if token is not None)

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files, for another model that has it."""
        self._tokenizer.save_pretrained(str(directory))

    @property
    def vocab_size(self) -> int:
        """Number of tokens the tokenizer knows; the model's vocabulary may be padded beyond it."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def num_ids(self) -> int:
        """One more than the highest id the tokenizer knows; ids below it may be unused."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def token(self, index: int) -> str | None:
        """The string an id stands for, as the tokenizer spells it; None where it knows no such id."""
        return self._backend.id_to_token(index)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, prompt: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens the model expects around one (a BOS, for some).

        Raises:
            RequestError: The prompt is empty or not text.
        """
        if not isinstance(prompt, str):
            raise RequestError("prompt", f"a {type(prompt).__name__}", "a string")
        if not prompt:
            raise RequestError("prompt", "an empty prompt", "at least one character")
        return self._ids(prompt, special=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> list[int]:
        """Ids of a conversation, up to where the model's answer begins.

        Special tokens come from the template alone, so none is added twice.

        Args:
            messages: Turns with `role` and `content`.
            options: Extra variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: There is no message or no template, a turn is malformed, or the template refuses the turns.
        """
        return self._ids(self.render_chat(messages, options), special=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> str:
        """The text of a conversation as the model sees it; see `encode_chat`."""
        from jinja2 import TemplateError

        _check_messages(messages)
        if not self.has_chat_template:
            hint = "give a plain prompt instead of messages"
            raise RequestError("messages", f"{self.name} has no chat template", "a model tuned for chat", hint)
        turns = [dict(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, **(options or {})
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise RequestError("messages", f"the chat template of {self.name} refuses them: {error}") from error
        return str(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> TextStream:
        """A decoder for one request, fed as its tokens arrive."""
        return TextStream(self._backend, self._special, self._raw_bytes)

    def _ids(self, text: str, special: bool) -> list[int]:
        try:
            ids = self._backend.encode(text, add_special_tokens=special).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("prompt", "text that is not valid Unicode (a lone surrogate)", "valid text") from error
        if not ids:
            raise RequestError("prompt", "a prompt without a single token", "at least one token")
        return list(ids)


class TextStream:
    """Text of one request as its tokens arrive: the pieces joined are `TextCodec.decode` of all tokens.

    A character spread over several tokens is held back until it is whole; `flush` gives what is still held when the
    request ends. A run of raw byte tokens (`<0x0A>`) is held until it ends, because one invalid byte in it changes
    the text of the whole run. Only tokens whose text is not out yet, and those of the piece before, are remembered.
    """

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int], raw_bytes: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._raw_bytes = raw_bytes
        self._before: list[int] = []  # of the latest piece: decoders treat the first token of a text apart
        self._given = ""  # text of those alone
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """Text that these tokens complete; may be empty."""
        return "".join(self._step(token) for token in ids if token not in self._special)

    def peek(self) -> str:
        """Text of what is held if it is whole, valid characters by now, without giving it out; else empty.

        A byte that follows may still spoil it: `push` is what decides the text.
        """
        text = self._held_text()
        return "" if _BROKEN in text else text

    def flush(self) -> str:
        """The rest of the text: bytes that never became a character show as U+FFFD."""
        return self._give(self._held_text())

    def _step(self, token: int) -> str:
        self._held.append(token)
        if token in self._raw_bytes:
            return ""
        text = self._held_text()
        return "" if text.endswith(_BROKEN) else self._give(text)

    def _held_text(self) -> str:
        if not self._held:
            return ""
        text = self._tokenizer.decode([*self._before, *self._held], skip_special_tokens=True)
        return text[len(self._given) :]

    def _give(self, text: str) -> str:
        if text:
            self._before, self._held = self._held, []
            self._given = self._tokenizer.decode(self._before, skip_special_tokens=True)
        return text


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages", f"a {type(messages).__name__}", "a list of turns with role and content")
    if not messages:
        raise RequestError("messages", "an empty list", "at least one turn")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RequestError(f"messages[{index}]", repr(message)[:80], "a turn with role and content")
    if not any(message["content"] for message in messages):
        raise RequestError("messages", "only empty turns", "some content")
