"""transformers: greedy `generate` with sdpa attention, and the same with prompt lookup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

__all__ = ["Peer"]


class _Streamer:
    """Hands on token ids as they come, but for the prompt, which comes first."""

    def __init__(self, seen: Any) -> None:
        self._seen = seen
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if self._prompt_seen:
            self._seen.add(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


class Peer:
    """One model in one type."""

    def __init__(self, directory: Path, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        ).eval()
        self._model.generation_config = GenerationConfig()  # the checkpoint's defaults are not what is compared

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int, lookup: int | None, seen: Any) -> None:
        """Greedy, of fixed length."""
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
            prompt_lookup_num_tokens=lookup,
            assistant_confidence_threshold=0.0,
        )
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        self._model.generate(ids, attention_mask=mask, generation_config=config, streamer=_Streamer(seen))

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Any:
        """After every token.  # [tokens, V]"""
        return self._model(torch.tensor([tokens])).logits[0].float().numpy()
