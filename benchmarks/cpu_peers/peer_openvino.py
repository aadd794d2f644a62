"""openvino-genai: `LLMPipeline`, and the same with prompt lookup.

Two pipelines, because lookup is chosen when one is made. The cache has the type of the computation for float32 and
bfloat16, and the default of the device for int8 weights. With those the device computes in bfloat16 where it can, which
is fastest; int8-float32 computes in float32, which keeps more of the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

__all__ = ["Peer"]

PROPERTIES = {
    "float32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16"},
    "int8": {},
    "int8-float32": {"INFERENCE_PRECISION_HINT": "f32"},
}
NGRAM = 3  # longest match that is looked up


class _Streamer(genai.StreamerBase):
    """Hands on token ids as they come; the base would wait for nothing else."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self._seen = seen

    def write(self, token: Any) -> Any:
        self._seen.add([token] if isinstance(token, int) else list(token))
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing is held back."""


class Peer:
    """One model at one precision."""

    def __init__(self, directory: Path, dtype: str, threads: int) -> None:
        self._directory = directory
        self._settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", **PROPERTIES[dtype]}
        self._plain = genai.LLMPipeline(str(directory), "CPU", **self._settings)
        self._lookup = genai.LLMPipeline(str(directory), "CPU", prompt_lookup=True, **self._settings)
        self._scorer: Any = None  # made when asked for

    def generate(self, prompt: list[int], max_new_tokens: int, lookup: int | None, seen: Any) -> None:
        """Greedy, of fixed length."""
        config = genai.GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True)
        if lookup is not None:
            config.num_assistant_tokens, config.max_ngram_size = lookup, NGRAM
        ids = np.array([prompt], np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        (self._plain if lookup is None else self._lookup).generate(inputs, config, _Streamer(seen))

    def logits(self, tokens: list[int]) -> Any:
        """After every token, from the same file with the same settings.  # [tokens, V]"""
        if self._scorer is None:
            model = ov.Core().compile_model(self._directory / "openvino_model.xml", "CPU", self._settings)
            self._scorer = model.create_infer_request()
        request = self._scorer
        request.reset_state()
        ids = np.array([tokens], np.int64)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.size)[None]}
        request.infer({**inputs, "beam_idx": np.zeros(1, np.int32)})
        return request.get_tensor("logits").data[0].copy()
