"""What passes between the target and the drafter: prompts, features, and the block of a round without a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast

import torch

from specflow.draft.base import Needs
from specflow.errors import GraphError
from specflow.law import PointMass
from specflow.sampling import BatchSampler
from specflow.tree import chain
from specflow.types import DraftBlock, Features, Observation, TargetOutput

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.base import Drafter
    from specflow.target.base import Cache, PickingTarget, Target, TargetInfo
    from specflow.types import Sampling

__all__ = ["Prompt", "asks_for_likeliest", "empty_block", "features_of", "prefill", "score_block"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt on its way into a row of the batch."""

    tokens: tuple[int, ...]
    chunk: int  # tokens of one pass
    row: int


def prefill(target: Target, cache: Cache, prompt: Prompt, drafter: Drafter | None) -> tuple[TargetOutput, int]:
    """Run a prompt through the target in chunks, and show the drafter the features of all chunks but the last.

    Chunks depend on the prompt alone, so neighbours in the batch change nothing. The last chunk is left to the caller,
    who knows the token that follows it.

    Args:
        cache: The row's part of the cache, empty.

    Returns:
        The output of the last chunk, whose logits score the first new token, and where that chunk began.
    """
    device = target.info.device
    needs = drafter.needs if drafter is not None else Needs()
    for begin in range(0, len(prompt.tokens), prompt.chunk):
        part = prompt.tokens[begin : begin + prompt.chunk]
        tokens = torch.tensor([part], device=device)
        positions = torch.arange(begin, begin + len(part), device=device).unsqueeze(0)
        output = target.forward(tokens, positions, cache, taps=needs.taps, rows="last")
        cache.keep([len(part)])
        following = prompt.tokens[begin + 1 : begin + len(part) + 1]
        if drafter is not None and needs.any and len(following) == len(part):
            features = features_of(output, needs)
            drafter.observe(Observation((following,), (begin,), (len(part),), features), [prompt.row])
    return output, begin


def score_block(
    target: Target, cache: Cache, anchors: Sequence[int], block: DraftBlock, needs: Needs, greedy: bool = False
) -> TargetOutput:
    """One pass over each row's anchor and its block; through the rest of the layers where the draft has run the first.

    Args:
        target: Scores them.
        cache: All committed tokens but the anchors.
        anchors: Last committed token of each row.  # [B]
        block: What was drafted.
        needs: Features the drafter wants of these rows.
        greedy: Nothing but the likeliest token of every row will be asked for.

    Raises:
        GraphError: It wants features of layers that the draft has run already.
    """
    tokens, positions = torch.tensor([anchors, cache.lengths], device=target.info.device).unsqueeze(2)
    if block.num_nodes:
        tokens = torch.cat((tokens, block.tokens), dim=1)
        positions = (positions + block.topology.depth).clamp_max(target.info.context_length - 1)  # of PAD rows
    mask = None if block.topology.is_chain else block.topology.ancestors
    picks = greedy and target.info.picks
    rows: Literal["all", "none"] = "none" if picks else "all"
    if (entry := block.entry) is None:
        output = target.forward(tokens, positions, cache, mask, needs.taps, rows=rows)
        return _with_picked(target, output) if picks else output
    if below := [tap for tap in needs.taps if tap < entry.layer]:
        found = f"taps {', '.join(map(str, below))} below layer {entry.layer}, where verification begins"
        raise GraphError("draft", found, f"taps from {entry.layer} on", "exit earlier, or tap later layers")
    rest = entry.layer, target.info.num_layers
    output = target.forward(tokens, positions, cache, mask, needs.taps, layers=rest, hidden_in=entry.hidden, rows=rows)
    return _with_picked(target, output) if picks else output


def _with_picked(target: Target, output: TargetOutput) -> TargetOutput:
    assert output.hidden_post is not None, "the target gave no hidden states"
    return replace(output, picked=cast("PickingTarget", target).pick(output.hidden_post))


def empty_block(batch: int, vocab_size: int, device: torch.device) -> DraftBlock:
    """A block with no nodes: the round is a plain step."""
    tokens = torch.empty(batch, 0, dtype=torch.int64, device=device)
    return DraftBlock(tokens, (0,) * batch, chain(0, device), PointMass(tokens, vocab_size))


def features_of(output: TargetOutput, needs: Needs, path: Tensor | None = None) -> Features | None:
    """The features a drafter asked for, in the order of the accepted path.

    Args:
        output: A target pass.
        needs: What the drafter wants.
        path: Rows of the accepted path, PAD padded; None where they are rows 0, 1, ...  # [B, D + 1]
    """
    if not needs.any:
        return None

    def along(rows: Tensor) -> Tensor:
        if path is None:
            return rows
        return rows.gather(1, path.clamp_min(0).unsqueeze(-1).expand(-1, -1, rows.shape[-1]))

    def asked(wanted: bool, rows: Tensor | None) -> Tensor | None:
        if not wanted:
            return None
        assert rows is not None, "the target gave no hidden states"
        return along(rows)

    return Features(
        taps={layer: along(output.taps[layer]) for layer in needs.taps},
        hidden_pre=asked(needs.hidden_pre, output.hidden_pre),
        hidden_post=asked(needs.hidden_post, output.hidden_post),
    )


def asks_for_likeliest(info: TargetInfo, sampling: Sampling) -> bool:
    """Whether rounds of such requests need nothing but the likeliest token of every row, once stop ids are possible."""
    sampler = BatchSampler(info.vocab_size, info.stop_ids, info.device)
    sampler.reset(1)
    sampler.start(0, sampling, 0, ())
    return not sampling.logprobs and sampler.takes_likeliest([sampling.min_new_tokens])
