"""A trace in memory: positions of all requests in a row, and what each drafter said there. Numpy, no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specflow.errors import DataError
from specflow.types import PAD
from tuner.replay_types import DrafterInfo, TraceInfo
from tuner.trace_store import TraceStore, drafter_info

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]

__all__ = ["Drafts", "Trace", "TracedRequest", "load_trace"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request; its positions are `first` .. `end - 1` of the trace, one for each token but the last."""

    key: str
    category: str
    prompt_tokens: int
    num_tokens: int  # generated
    most: int  # tokens that it could have had
    first: int
    end: int


@dataclass(frozen=True)
class Drafts:
    """What one drafter said at every position.

    A chain has columns by draft position, a tree by how deep it was allowed to grow, from 1.
    """

    info: DrafterInfo
    agree: NDArray[Any]  # chain [P]: tokens up to the first that is not the text's; tree [P, K]
    length: NDArray[Any]  # chain [P]: tokens drafted; tree [P, K]: its deepest level
    nodes: NDArray[Any] | None = None  # [P, K] of a tree
    tokens: NDArray[Any] | None = None  # [P, K] of a chain, PAD past its end
    match: NDArray[Any] | None = None  # [P] tokens of text that a copy continues
    confidence: NDArray[Any] | None = None  # [P, K]
    chance: NDArray[Any] | None = None  # [P, K] probability that the drafter gave its own token
    law: NDArray[Any] | None = None  # [P, K] q of the text's own tokens, each after the ones before
    law_confidence: NDArray[Any] | None = None  # [P, K] confidence along the text

    @cached_property
    def lengths(self) -> list[Any]:
        """`length` as plain numbers: reading one is many times faster."""
        found: list[Any] = self.length.tolist()
        return found

    @cached_property
    def matches(self) -> list[int]:
        """`match` as plain numbers."""
        assert self.match is not None
        found: list[int] = self.match.tolist()
        return found


@dataclass(frozen=True)
class Trace:
    """Texts of plain decoding, and what drafters said at each of their positions.

    A position is that of an anchor: the token that was generated last.
    """

    info: TraceInfo
    requests: tuple[TracedRequest, ...]
    request: NDArray[Any]  # [P] number of the request
    left: NDArray[Any]  # [P] tokens after the anchor
    limit: NDArray[Any]  # [P] draft tokens that can still be of use
    context: NDArray[Any]  # [P] committed tokens, the anchor not counted
    chance: NDArray[Any]  # [P] the target's probability of the token after the anchor; 1 where it is greedy
    drafts: Mapping[str, Drafts] = field(default_factory=dict)

    @property
    def num_positions(self) -> int:
        return len(self.request)

    @cached_property
    def ends(self) -> NDArray[Any]:
        """Where each position's request ends.  # [P]"""
        found: NDArray[Any] = np.array([request.end for request in self.requests], dtype=np.int64)[self.request]
        return found


def load_trace(path: Path) -> Trace:
    """Read a trace. Drafters that were not recorded to the end are left out, and named in the log.

    Raises:
        DataError: It is none, damaged, or its texts are not finished.
    """
    store = TraceStore.open(path)
    header = store.header
    if not header["requests"]:
        raise DataError(str(path), "a trace of no requests", "at least one")
    try:
        texts = [store.read(number) for number in range(len(header["requests"]))]
        return _assembled(store, texts)
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        found = f"does not fit together: {type(error).__name__}: {error}"
        raise DataError(str(path), found, "a trace as it was written", "trace again") from error


def _assembled(store: TraceStore, texts: Sequence[Arrays]) -> Trace:
    header, requests, first = store.header, [], 0
    for facts, text in zip(header["requests"], texts, strict=True):
        count = len(text["tokens"])
        end = first + max(count - 1, 0)
        prompt = int(facts["prompt_tokens"])
        most = int(facts["most"])
        requests.append(TracedRequest(str(facts["key"]), str(facts["category"]), prompt, count, most, first, end))
        first = end
    sizes = [each.end - each.first for each in requests]
    step = np.concatenate([np.arange(size) for size in sizes])
    number = np.repeat(np.arange(len(requests)), sizes)
    follows = np.concatenate([text["tokens"][1:] for text in texts])  # [P] the token after each anchor
    left = np.repeat(sizes, sizes) - step
    trace = Trace(
        info=_info(header, requests, {}),
        requests=tuple(requests),
        request=number,
        left=left,
        limit=np.maximum(np.array([each.most for each in requests])[number] - step - 2, 0),
        context=np.array([each.prompt_tokens for each in requests])[number] + step,
        chance=np.concatenate([text["chances"] for text in texts]),
    )
    if len(trace.chance) != len(number):
        raise ValueError(f"{len(trace.chance)} probabilities of {len(number)} tokens")
    drafts = {}
    for index, data in enumerate(header["drafters"]):
        info = drafter_info(data)
        if not all(store.has(each, index) for each in range(len(requests))):
            log.warning("%s: drafter %s was not recorded to the end; trace it again to go on", store.path, info.name)
            continue
        parts = [store.read(each, index) for each in range(len(requests))]
        drafts[info.name] = _drafts(info, parts, follows, left)
    return replace(trace, info=_info(header, requests, drafts), drafts=drafts)


def _drafts(info: DrafterInfo, parts: Sequence[Arrays], follows: NDArray[Any], left: NDArray[Any]) -> Drafts:
    names = sorted({name for part in parts for name in part})
    whole = {name: np.concatenate([_lines(part, name, parts) for part in parts]) for name in names}
    if short := [name for name, values in whole.items() if len(values) != len(left)]:
        raise ValueError(f"{len(whole[short[0]])} lines of {short[0]} of {info.name} at {len(left)} positions")
    if info.tree:
        return Drafts(info, whole["agree"], whole["depth"], nodes=whole["nodes"])
    tokens = whole["tokens"]
    ahead = np.arange(tokens.shape[1])
    after = np.arange(len(tokens))[:, None] + ahead
    known = ahead < left[:, None]
    right = (tokens == np.where(known, follows[np.minimum(after, len(follows) - 1)], PAD)) & (tokens != PAD) & known
    drafts = {name: whole.get(name) for name in ("match", "confidence", "chance", "law", "law_confidence")}
    return Drafts(
        info,
        agree=np.logical_and.accumulate(right, axis=1).sum(axis=1),
        length=(tokens != PAD).sum(axis=1),
        tokens=tokens,
        **drafts,
    )


def _lines(part: Arrays, name: str, parts: Sequence[Arrays]) -> NDArray[Any]:
    """An array of a file; empty lines where the request drafted nothing that could have said it."""
    if name in part:
        return part[name]
    like = next(each[name] for each in parts if name in each)
    return np.zeros((len(part["tokens"]), *like.shape[1:]), like.dtype)


def _info(header: Mapping[str, Any], requests: Sequence[TracedRequest], drafts: Mapping[str, Drafts]) -> TraceInfo:
    settings, recipes = header["settings"], header["recipes"]
    return TraceInfo(
        target=settings["target"],
        sampling=settings["sampling"],
        greedy=bool(settings["greedy"]),
        drafters={name: each.info for name, each in drafts.items()},
        recipes={name: tuple(parts) for name, parts in recipes.items() if all(part in drafts for part in parts)},
        num_requests=len(requests),
        num_tokens=sum(each.num_tokens for each in requests),
        categories=tuple(dict.fromkeys(each.category for each in requests)),
        provenance=header["provenance"][-1] if header["provenance"] else {},
    )
