"""llama.cpp through llama-cpp-python: plain, and with its prompt lookup.

Lookup needs the logits of every row, which the plain context does not keep; so each has a context of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

__all__ = ["Peer"]

CONTEXT = 2048
NGRAM = 3  # longest match that is looked up


class Peer:
    """One GGUF file."""

    def __init__(self, path: Path, dtype: str, threads: int) -> None:
        settings = {"n_ctx": CONTEXT, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        self._draft = LlamaPromptLookupDecoding(NGRAM)
        self._plain = llama_cpp.Llama(str(path), **settings)
        self._lookup = llama_cpp.Llama(str(path), draft_model=self._draft, logits_all=True, **settings)

    def generate(self, prompt: list[int], max_new_tokens: int, lookup: int | None, seen: Any) -> None:
        """Greedy, of fixed length; `generate` itself knows no stop id. What it drafts past the end is its own time."""
        llama = self._plain if lookup is None else self._lookup
        self._draft.num_pred_tokens = lookup or 0
        llama.reset()
        for token in llama.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0):
            seen.add([int(token)])
            if len(seen.tokens) == max_new_tokens:
                return

    def logits(self, tokens: list[int]) -> Any:
        """After every token.  # [tokens, V]"""
        self._lookup.reset()
        self._lookup.eval(tokens)
        return self._lookup.scores[: len(tokens)].copy()
