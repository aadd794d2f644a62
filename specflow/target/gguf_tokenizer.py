"""The tokenizer inside a GGUF file, written as `tokenizer.json` and `tokenizer_config.json`.

A GGUF file names its pre-tokenizer only by a keyword. An unknown keyword is refused: a wrong split still gives text,
but with other token ids than the model was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specflow.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["GgufVocabulary", "build_tokenizer", "write_tokenizer"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Splitter:
    """How one pre-tokenizer keyword of llama.cpp splits text before the merges."""

    pattern: str | None = None  # None: GPT-2's own pattern, built into the byte-level step
    digits: bool = False  # every digit stands alone
    ignore_merges: bool = False  # a whole word in the vocabulary needs no merges
    nfc: bool = False
    adds_bos: bool = False  # where the file does not say


_SPLITTERS: Mapping[str, _Splitter] = {
    "default": _Splitter(),
    "gpt-2": _Splitter(),
    "smollm": _Splitter(digits=True),
    "llama-bpe": _Splitter(_LLAMA3, ignore_merges=True, adds_bos=True),
    "llama3": _Splitter(_LLAMA3, ignore_merges=True, adds_bos=True),
    "qwen2": _Splitter(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Splitter(_QWEN2, nfc=True),
    "tekken": _Splitter(_TEKKEN, ignore_merges=True, adds_bos=True),
}


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The `tokenizer.*` fields of a GGUF file."""

    where: str
    kind: str  # "gpt2": byte-level merges; "llama": sentencepiece scores
    pre: str
    tokens: tuple[str, ...]  # [V]
    types: tuple[int, ...]  # [V]
    scores: tuple[float, ...]
    merges: tuple[str, ...]
    ids: Mapping[str, int]  # bos, eos, eot, unknown, padding
    add_bos: bool
    space_prefix: bool
    chat_template: str | None

    @classmethod
    def read(cls, fields: Mapping[str, Any], where: str) -> GgufVocabulary:
        """Take the vocabulary from a file's fields.

        Raises:
            CheckpointError: There is none, or its kind or pre-tokenizer is unknown.
        """
        prefix = "tokenizer.ggml."
        kind, pre = str(fields.get(prefix + "model", "")), str(fields.get(prefix + "pre", "default"))
        if kind not in ("gpt2", "llama") or prefix + "tokens" not in fields:
            raise CheckpointError(where, f"tokenizer model {kind!r}", "gpt2 (byte-level) or llama (sentencepiece)")
        if kind == "gpt2" and pre not in _SPLITTERS:
            raise CheckpointError(where, f"pre-tokenizer {pre!r}", f"one of {', '.join(_SPLITTERS)}")
        tokens = tuple(fields[prefix + "tokens"])
        names = ("bos", "eos", "eot", "unknown", "padding")
        found = {name: fields.get(f"{prefix}{name}_token_id") for name in names}
        default_bos = kind == "llama" or _SPLITTERS[pre].adds_bos
        return cls(
            where=where,
            kind=kind,
            pre=pre,
            tokens=tokens,
            types=tuple(fields.get(prefix + "token_type", (_NORMAL,) * len(tokens))),
            scores=tuple(fields.get(prefix + "scores", ())),
            merges=tuple(fields.get(prefix + "merges", ())),
            ids={name: int(value) for name, value in found.items() if value is not None and value < len(tokens)},
            add_bos=bool(fields.get(prefix + "add_bos_token", default_bos)),
            space_prefix=bool(fields.get(prefix + "add_space_prefix", True)),
            chat_template=fields.get("tokenizer.chat_template"),
        )

    def token(self, name: str) -> str | None:
        return self.tokens[self.ids[name]] if name in self.ids else None

    @property
    def stop_ids(self) -> list[int]:
        return sorted({self.ids[name] for name in ("eos", "eot") if name in self.ids})


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """A `tokenizers.Tokenizer` with the ids of the file."""
    from tokenizers import AddedToken, processors

    build = _build_byte_level if vocabulary.kind == "gpt2" else _build_sentencepiece
    tokenizer = build(vocabulary)
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    bos = vocabulary.token("bos")
    if vocabulary.add_bos and bos is not None:
        template = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary.ids["bos"])]
        )
        steps = [template] if vocabulary.kind == "llama" else [processors.ByteLevel(trim_offsets=False), template]
        tokenizer.post_processor = processors.Sequence(steps)
    return tokenizer


def write_tokenizer(vocabulary: GgufVocabulary, directory: Path, context_length: int) -> None:
    """Write the tokenizer files that transformers 4 and 5 both read."""
    build_tokenizer(vocabulary).save(str(directory / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.add_bos,
    }
    for name, key in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        token = vocabulary.token(name)
        if token is not None:
            config[key] = token
    if vocabulary.chat_template:
        config["chat_template"] = vocabulary.chat_template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _build_byte_level(vocabulary: GgufVocabulary) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    splitter = _SPLITTERS[vocabulary.pre]
    vocab = _vocab(vocabulary)
    merges = [_split_merge(merge, vocab, vocabulary.where) for merge in vocabulary.merges]
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=splitter.ignore_merges)
    tokenizer = Tokenizer(model)
    steps: list[Any] = []
    if splitter.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitter.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitter.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitter.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    model = models.BPE(
        vocab=_vocab(vocabulary),
        merges=_merges_from_scores(vocabulary),
        unk_token=vocabulary.token("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    to_mark = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_mark])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = to_mark
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _vocab(vocabulary: GgufVocabulary) -> dict[str, int]:
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    if len(vocab) != len(vocabulary.tokens):
        raise CheckpointError(vocabulary.where, f"{len(vocab)} distinct tokens", f"{len(vocabulary.tokens)}")
    return vocab


def _split_merge(merge: str, vocab: Mapping[str, int], where: str) -> tuple[str, str]:
    # Byte-level pieces hold no plain space, so the first one separates the pair.
    left, space, right = merge.partition(" ")
    if not space or not {left, right, left + right} <= vocab.keys():
        raise CheckpointError(where, f"merge {merge!r}", "two tokens of the vocabulary that join to a third")
    return left, right


def _merges_from_scores(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Merges that reproduce sentencepiece: the pair whose joined piece has the highest score goes first."""
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise CheckpointError(vocabulary.where, "no sentencepiece scores", "tokenizer.ggml.scores, one a token")
    vocab = _vocab(vocabulary)
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True):
        if kind != _NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]
