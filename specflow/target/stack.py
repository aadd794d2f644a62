"""The decoder layers of a transformers model, found by structure: watched, skipped and entered from outside.

Nothing of the model is copied or subclassed. Two hooks that stay read the last hidden states. For one pass, others read
taps or replace the input, and `forward` of a skipped module is shadowed on the instance; both are undone when the pass
ends, however it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from specflow.errors import ModelError
from specflow.types import Skip

__all__ = ["DecoderStack", "Watch"]

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]

_NOTHING = Skip()

_ATTENTION_NAMES = ("self_attn", "self_attention", "attention", "attn")
_FINAL_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
_MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe")


@dataclass(slots=True)
class Watch:
    """Hidden states seen in one pass."""

    taps: dict[int, Tensor] = field(default_factory=dict)  # layer -> [B, M, H]
    hidden_pre: Tensor | None = None  # [B, M, H]
    hidden_post: Tensor | None = None  # [B, M, H]


class DecoderStack:
    """The list of decoder layers, and what may be done to it during a pass."""

    def __init__(self, model: nn.Module, num_layers: int, run: Callable[[], object]) -> None:
        """Find the layers.

        Args:
            model: The causal language model.
            num_layers: Decoder layers its configuration states.  # L
            run: Runs any small pass of the model; the layers are those that run in it.

        Raises:
            ModelError: No list of modules of this length runs.
        """
        lists = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == num_layers
        }
        parts = [module for found in lists.values() for layer in found for module in _parts(layer)]
        self._forms = _watch_forms(parts, run)
        ran = sorted((name for name, found in lists.items() if all(layer in self._forms for layer in found)), key=len)
        if not ran:
            raise ModelError(
                "target.model",
                f"no list of {num_layers} layers runs in a pass of {type(model).__name__}",
                "a decoder whose layers are one ModuleList, each called once a pass",
            )
        self.layers = tuple(lists[ran[0]])
        self._owner = model.get_submodule(ran[0].rpartition(".")[0])
        norms = [child for name, child in self._owner.named_children() if name in _FINAL_NORM_NAMES]
        self._final_norm = norms[0] if norms else None
        self._attention = [_child(layer, _ATTENTION_NAMES) for layer in self.layers]
        self._mlp = [_child(layer, _MLP_NAMES) for layer in self.layers]
        self._seen: Watch | None = None
        self.layers[-1].register_forward_hook(self._leave)
        self._owner.register_forward_hook(self._finish)
        self._skip_refusal = self._find_refusal(run)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The norm between the last layer and the head.

        Raises:
            ModelError: The module that owns the layers has none under a known name.
        """
        if self._final_norm is None:
            found = f"{type(self._owner).__name__} has no final norm of its own"
            raise ModelError("target.model", found, f"a module named {' or '.join(_FINAL_NORM_NAMES)}")
        normed: Tensor = self._final_norm(hidden)
        return normed

    @contextmanager
    def watch(self, taps: Sequence[int], first: int = 0, hidden_in: Tensor | None = None) -> Iterator[Watch]:
        """Collect hidden states of the passes run inside; `hidden_in` replaces the input of layer `first`."""
        self._seen = seen = Watch()
        handles = self._hook(seen, taps, first, hidden_in) if taps or hidden_in is not None else []
        try:
            yield seen
        finally:
            self._seen = None
            for handle in handles:
                handle.remove()

    def _hook(
        self, seen: Watch, taps: Sequence[int], first: int, hidden_in: Tensor | None
    ) -> list[torch.utils.hooks.RemovableHandle]:
        def enter(_: nn.Module, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
            if hidden_in is not None:
                args, kwargs = _with_hidden(args, kwargs, hidden_in)
            if -1 in taps:
                seen.taps[-1] = _hidden_of(args, kwargs)
            return args, kwargs

        def tap(index: int) -> Callable[[nn.Module, object, Any], None]:
            return lambda _, __, output: seen.taps.__setitem__(index, _hidden_of((), {"": output}))

        entry = self.layers[min(first, len(self.layers) - 1)]
        handles = [entry.register_forward_pre_hook(enter, with_kwargs=True)]
        return handles + [self.layers[index].register_forward_hook(tap(index)) for index in taps if index >= 0]

    def _leave(self, _: nn.Module, __: object, output: Any) -> None:
        if self._seen is not None:
            self._seen.hidden_pre = _hidden_of((), {"": output})

    def _finish(self, _: nn.Module, __: object, output: Any) -> None:
        if self._seen is not None:
            self._seen.hidden_post = output[0]

    @contextmanager
    def leave_out(self, layers: tuple[int, int], skip: Skip) -> Iterator[None]:
        """Make layers outside the half-open range, and skipped branches inside it, pass the residual through.

        Raises:
            ModelError: Branches are to be skipped and this model's layers do not allow it.
        """
        if (skip.attention or skip.mlp) and self._skip_refusal:
            expected = "layers that add an attention and an MLP branch to the residual"
            raise ModelError("target.skip", self._skip_refusal, expected)
        if skip == _NOTHING and layers == (0, len(self.layers)):
            yield
            return
        with ExitStack() as shadows:
            for index, layer in enumerate(self.layers):
                if not layers[0] <= index < layers[1]:
                    shadows.enter_context(_shadowed(layer, self._forms[layer], _unchanged))
                    continue
                for chosen, branch in ((skip.attention, self._attention[index]), (skip.mlp, self._mlp[index])):
                    if index in chosen and branch is not None:
                        shadows.enter_context(_shadowed(branch, self._forms[branch], torch.zeros_like))
            yield

    def _find_refusal(self, run: Callable[[], object]) -> str:
        """Why branches cannot be skipped; empty where they can. Tried: with all skipped, input must equal output."""
        for what, branches in (("attention", self._attention), ("MLP", self._mlp)):
            lacking = [index for index, branch in enumerate(branches) if branch is None or branch not in self._forms]
            if lacking:
                layer = type(self.layers[lacking[0]]).__name__
                return f"layer {lacking[0]} ({layer}) has no {what} sub-module of its own"
        everything = frozenset(range(len(self.layers)))
        self._skip_refusal = ""
        with self.watch((-1,)) as seen, self.leave_out((0, len(self.layers)), Skip(everything, everything)):
            run()
        if seen.hidden_pre is not None and torch.equal(seen.taps[-1], seen.hidden_pre):
            return ""
        return f"{type(self.layers[0]).__name__} changes the residual stream outside its attention and MLP branches"


def _parts(layer: nn.Module) -> list[nn.Module]:
    parts = (layer, _child(layer, _ATTENTION_NAMES), _child(layer, _MLP_NAMES))
    return [module for module in parts if module is not None]


def _child(layer: nn.Module, names: Sequence[str]) -> nn.Module | None:
    return next((child for name, child in layer.named_children() if name in names), None)


def _watch_forms(modules: Sequence[nn.Module], run: Callable[[], object]) -> dict[nn.Module, int]:
    """For every module that runs: the length of the tuple it returns, 0 for a bare tensor."""
    forms: dict[nn.Module, int] = {}

    def note(module: nn.Module, _: object, output: object) -> None:
        forms[module] = len(output) if isinstance(output, tuple) else 0

    handles = [module.register_forward_hook(note) for module in modules]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return forms


@contextmanager
def _shadowed(module: nn.Module, form: int, answer: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let a module answer with a function of its hidden states, in the form it usually returns."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = answer(_hidden_of(args, kwargs))
        return (hidden, *[None] * (form - 1)) if form else hidden

    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden


def _hidden_of(args: _Args, kwargs: _Kwargs) -> Tensor:
    """The hidden states among a module's arguments, or of its output: the first of them."""
    found = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))
    tensor: Tensor = found[0] if isinstance(found, tuple) else found
    return tensor


def _with_hidden(args: _Args, kwargs: _Kwargs, hidden: Tensor) -> tuple[_Args, _Kwargs]:
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}
