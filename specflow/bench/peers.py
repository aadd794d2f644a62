"""Other decoders of the same weights, measured in the same run at their best.

transformers: greedy `generate` with sdpa attention is its best plain path; its best speculative path without a second
model is prompt lookup, whose K is swept, each value a method of its own. Same token ids, stop ids, type and threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specflow.bench.methods import Ask, Kind, Outcome
from specflow.errors import DataError, ModelError

if TYPE_CHECKING:
    import torch

__all__ = ["PEERS", "PeerTarget", "TransformersPeer", "load_peers"]

LOOKUP_TOKENS = (3, 5, 10)


@dataclass(frozen=True, slots=True)
class PeerTarget:
    """The model a peer must load to be comparable."""

    directory: Path  # weights in the layout of transformers
    dtype: torch.dtype
    device: torch.device
    stop_ids: tuple[int, ...]
    decode: Callable[[Sequence[int]], str]


def load_peers(names: Sequence[str], target: PeerTarget) -> list[TransformersPeer]:
    """Every method of the named peers."""
    methods: list[TransformersPeer] = []
    for name in dict.fromkeys(names):
        if name not in PEERS:
            raise DataError("--peer", f"'{name}' is not known", f"one of: {', '.join(PEERS)}")
        methods.extend(PEERS[name](target))
    return methods


def _transformers(target: PeerTarget) -> list[TransformersPeer]:
    import transformers

    messages: Any = transformers.utils.logging
    messages.disable_progress_bar()
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(target.directory), dtype=target.dtype, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ModelError(str(target.directory), f"transformers cannot load it: {error}") from error
    model = model.to(target.device).eval()
    blank: Any = transformers.GenerationConfig
    model.generation_config = blank()  # the checkpoint's own defaults must not decide what is compared
    passes = _PassCounter()
    model.register_forward_pre_hook(passes)
    return [TransformersPeer(model, target, passes, lookup) for lookup in (None, *LOOKUP_TOKENS)]


PEERS: dict[str, Callable[[PeerTarget], list[TransformersPeer]]] = {"transformers": _transformers}


class _PassCounter:
    """Counts forward passes of the peer's model."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1


@dataclass(slots=True)
class _Arrivals:
    """A streamer that only writes down when tokens came, how many, and after how many passes."""

    passes: _PassCounter
    times: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    passes_at_first: int = 0
    prompt_seen: bool = False

    def put(self, value: Any) -> None:
        if not self.prompt_seen:  # `generate` hands over the prompt first
            self.prompt_seen = True
            return
        self.times.append(perf_counter())
        self.sizes.append(int(value.numel()))
        if len(self.times) == 1:
            self.passes_at_first = self.passes.count

    def end(self) -> None:
        """Nothing to flush."""


class TransformersPeer:
    """`generate` of transformers, plain (lookup None) or with prompt lookup of that many tokens."""

    kind: Kind

    def __init__(self, model: Any, target: PeerTarget, passes: _PassCounter, lookup: int | None) -> None:
        self.name = "transformers" if lookup is None else f"transformers lookup K={lookup}"
        self.kind = "peer plain" if lookup is None else "peer speculative"
        self.facts: Mapping[str, Any] = {
            "exactness": None,
            "runtime": "transformers",
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "lossy": False,
        }
        self._model = model
        self._target = target
        self._passes = passes
        self._lookup = lookup

    def generate(self, ask: Ask) -> Outcome:
        """Continue one prompt greedily."""
        import torch

        ids = torch.tensor([ask.prompt], device=self._target.device)  # [1, prompt]
        arrivals = _Arrivals(self._passes)
        started = perf_counter()
        try:
            with torch.inference_mode():
                output = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=self._settings(ask),
                    streamer=arrivals,
                )
        except (RuntimeError, ValueError, IndexError) as error:
            raise ModelError(self.name, f"{type(error).__name__}: {error}") from error
        tokens = tuple(output[0, len(ask.prompt) :].tolist())
        return self._outcome(ask, tokens, started, arrivals)

    def _settings(self, ask: Ask) -> Any:
        import transformers

        config: Any = transformers.GenerationConfig
        stops = [] if ask.ignore_eos else list(self._target.stop_ids)
        return config(
            do_sample=False,
            use_cache=True,
            max_new_tokens=ask.max_new_tokens,
            eos_token_id=stops or None,
            pad_token_id=self._target.stop_ids[0] if self._target.stop_ids else 0,
            prompt_lookup_num_tokens=self._lookup,
            assistant_confidence_threshold=0.0,
        )

    def _outcome(self, ask: Ask, tokens: tuple[int, ...], started: float, arrivals: _Arrivals) -> Outcome:
        stopped = not ask.ignore_eos and tokens[-1:] and tokens[-1] in self._target.stop_ids
        return Outcome(
            tokens=tokens,
            text=self._target.decode(tokens[:-1] if stopped else tokens),
            finish="stop" if stopped else "length",
            first_tokens=min(arrivals.sizes[0], len(tokens)),
            ttft_s=arrivals.times[0] - started,
            decode_s=arrivals.times[-1] - arrivals.times[0],
            rounds=self._passes.count - arrivals.passes_at_first,
            deliveries=tuple(time - started for time in arrivals.times),
        )
