"""onnxruntime-genai: its generator on graphs of its own builder, plain and with n-gram lookup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as genai

__all__ = ["Peer"]

NGRAM = 3  # length of the match that is looked up
NO_STOP = 49151  # the last row of the vocabulary, which no text has: answers are of fixed length


class Peer:
    """One directory of the builder."""

    def __init__(self, directory: Path, dtype: str, threads: int) -> None:
        session = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config = genai.Config(str(directory))
        config.overlay(json.dumps({"model": {"eos_token_id": [NO_STOP], "decoder": {"session_options": session}}}))
        self._model = genai.Model(config)

    def generate(self, prompt: list[int], max_new_tokens: int, lookup: int | None, seen: Any) -> None:
        """Greedy, of fixed length."""
        generator = self._generator(len(prompt) + max_new_tokens, lookup)
        generator.append_tokens(np.array(prompt, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
            seen.add([int(generator.get_next_tokens()[0])])

    def logits(self, tokens: list[int]) -> Any:
        """After every token.  # [tokens, V]"""
        generator = self._generator(len(tokens) + 1, None)
        generator.append_tokens(np.array(tokens, np.int32))
        return generator.get_output("logits")[0]

    def _generator(self, length: int, lookup: int | None) -> Any:
        options = genai.GeneratorParams(self._model)
        options.set_search_options(max_length=length, do_sample=False)
        if lookup is not None:
            options.set_speculative_options(ngram_size=NGRAM, max_draft_tokens=lookup)
        return genai.Generator(self._model, options)
