"""Sampling in the words of an OpenAI-compatible server: what a request says, and what a server takes for granted."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from specflow.export.engine_input import Fields
from specflow.export.recipe_view import Ledger, RecipeView

__all__ = ["REQUEST_NAMES", "read_defaults", "request_file", "server_defaults"]

REQUEST_NAMES: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "seed": "seed",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_ids": "stop_token_ids",
    "stop_strings": "stop",
    "ignore_eos": "ignore_eos",
    "logprobs": "logprobs",
}
"""Key of a recipe's sampling section -> key of a request."""

DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def request_file(view: RecipeView, ledger: Ledger, lacks: Collection[str] = ()) -> str:
    """Body of a request that samples as the recipe does, as JSON. What a server takes for granted is said all the same.

    Args:
        view: The recipe.
        ledger: Gets ticked off what the request says.
        lacks: Keys of the sampling section that the engine's requests do not have.
    """
    body: dict[str, Any] = {"model": view.target, "prompt": "PROMPT"}
    for key, name in REQUEST_NAMES.items():
        dotted = f"sampling.{key}"
        mentioned = any(each == dotted or each.startswith(f"{dotted}.") for each in view.said)
        if mentioned and key not in lacks:
            body[name] = _plain(getattr(view.sampling, key))
            ledger.says(dotted)
    return json.dumps(body, indent=2) + "\n"


def server_defaults(view: RecipeView, ledger: Ledger, length: str) -> dict[str, Any]:
    """What a server should take where a request says nothing.

    Args:
        view: The recipe.
        ledger: Gets ticked off what is said.
        length: What the engine calls the length cap; "" where it must not be a default.
    """
    found: dict[str, Any] = {}
    for key in DEFAULTS:
        if f"sampling.{key}" in view.said:
            found[key] = getattr(view.sampling, key)
            ledger.says(f"sampling.{key}")
    if length:
        found[length] = view.sampling.max_new_tokens
        ledger.says("sampling.max_new_tokens")
    return found


def read_defaults(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A recipe's sampling section from what a server takes for granted.

    Raises:
        RecipeError: A value has no sense.
    """
    fields = Fields(data, where)
    found: dict[str, Any] = {}
    for key in DEFAULTS:
        value = fields.whole(key, -1) if key == "top_k" else fields.number(key, -1e6, 1e6)
        if value is not None:
            found[key] = max(0, value) if key == "top_k" else value
    for name in ("max_new_tokens", "max_tokens"):
        if (value := fields.whole(name, 1)) is not None:
            found["max_new_tokens"] = value
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): each for key, each in value.items()}
    return list(value) if isinstance(value, tuple) else value
