"""A target that goes round a cycle of tokens, and drafters whose weights are solved so that they know the cycle.

The target's attention adds nothing, so each of its states is a function of one token, and another one at every layer.
Embeddings lie in the first half of the width alone. What a drafter reads of a token is mapped linearly to the state
whose head speaks the token that is to be drafted; any other layer, norm or order makes nonsense of that map.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import EOS, NumberText
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specflow.build import LoadedTarget
from specflow.draft.base import SourceContext
from specflow.draft.borrowed import TargetTables
from specflow.draft.nn.weights import SeededTensors
from specflow.draft.registry import discover
from specflow.files import write_json_atomic
from specflow.recipe import Recipe, parse_recipe
from specflow.target.base import TargetOptions
from specflow.target.transformer import NativeTarget

VOCAB, WIDTH, LAYERS, K = 26, 64, 4, 2
MASK = VOCAB - 1
CYCLE = torch.tensor([3, 17, 8, 21, 5, 12, 24, 9, 15, 4, 19, 7, 23, 11, 6, 20, 14, 10, 22, 13, 18, 16])
"""Each token is followed by the next one."""


class CycleText(NumberText):
    """Numbers for text, questions that are one."""

    has_chat_template = False

    def encode(self, text: str) -> list[int]:
        return [3 + len(text) % 20]


def cycle_model() -> LlamaForCausalLM:
    """The target."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, num_hidden_layers=LAYERS, max_position_embeddings=128, eos_token_id=EOS, **sizes)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.35)
        model.model.norm.weight.normal_(0, 2.0)
        model.model.embed_tokens.weight[:, WIDTH // 2 :] = 0.0
        model.model.embed_tokens.weight[MASK] = 0.0
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.mul_(6.0**index)  # every layer drowns what came before it
        states = model.model(CYCLE.unsqueeze(1)).last_hidden_state[:, 0]
        model.lm_head.weight.zero_()
        model.lm_head.weight[CYCLE.roll(-1)] = 8.0 * states / states.norm(dim=1, keepdim=True)
    return model


MODEL = cycle_model()
TARGET = NativeTarget(
    MODEL.config, dict(MODEL.state_dict()), TargetOptions("cycle", torch.float32, torch.device("cpu"), stop_ids=(EOS,))
)
LOADED = LoadedTarget(TARGET, CycleText())  # type: ignore[arg-type]


def states_of(layer: int) -> Tensor:
    """Output of a layer at every token of the cycle.  # [22, H]"""
    out = TARGET.forward(
        CYCLE.unsqueeze(1),
        torch.zeros(len(CYCLE), 1, dtype=torch.int64),
        TARGET.new_cache(len(CYCLE), 4),
        taps=(layer,),
    )
    return out.taps[layer][:, 0]


def last_states() -> Tensor:
    """After the final norm.  # [22, H]"""
    return TARGET.norm(states_of(LAYERS - 1).unsqueeze(0))[0]


def normed(rows: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    return rows / rows.square().mean(-1, keepdim=True).sqrt() * gain


def solve(read: Tensor, wanted: Tensor) -> Tensor:
    """The map that makes what is wanted of what is read.  # [22, F], [22, H] -> [H, F]"""
    return (torch.linalg.pinv(read.double()) @ wanted.double()).T.float()


def silence(tensors: dict[str, Tensor], block: str) -> None:
    """A block that adds nothing."""
    tensors[f"{block}.self_attn.o_proj.weight"].zero_()
    tensors[f"{block}.mlp.down_proj.weight"].zero_()


def solve_medusa(tensors: dict[str, Tensor]) -> None:
    states = normed(last_states())
    for head in range(3):
        rows = torch.zeros(VOCAB, WIDTH)
        rows[CYCLE.roll(-2 - head)] = states
        tensors[f"{head}.0.weight"] = rows


def solve_mtp(tensors: dict[str, Tensor]) -> None:
    silence(tensors, "mtp.layers.0")
    gain = torch.randn(WIDTH, generator=torch.Generator().manual_seed(4))
    tensors["mtp.pre_fc_norm_hidden.weight"] = gain
    tensors["mtp.norm.weight"] = torch.ones(WIDTH)
    read = normed(last_states(), gain)
    tensors["mtp.fc.weight"] = torch.cat((torch.zeros(WIDTH, WIDTH), solve(read, last_states().roll(-1, 0))), 1)


def solve_eagle1(tensors: dict[str, Tensor]) -> None:
    silence(tensors, "layers.0")
    tensors["fc.weight"] = torch.cat((torch.zeros(WIDTH, WIDTH), solve(last_states(), last_states().roll(-1, 0))), 1)
    tensors["fc.bias"].zero_()


def solve_eagle3(tensors: dict[str, Tensor]) -> None:
    silence(tensors, "midlayer")
    tensors["norm.weight"] = torch.ones(WIDTH)
    read = torch.cat((states_of(0), states_of(1), states_of(2)), 1)
    tensors["fc.weight"] = solve(read, last_states().roll(-1, 0))


def solve_dflash(tensors: dict[str, Tensor]) -> None:
    """Slots of mask tokens, whose embedding is zero, become what the last context row holds in its second half."""
    half, block = WIDTH // 2, "layers.0"
    silence(tensors, block)
    tensors["norm.weight"], tensors["hidden_norm.weight"] = torch.ones(WIDTH), torch.ones(WIDTH)
    code = torch.randn(len(CYCLE), half, generator=torch.Generator().manual_seed(5))
    tensors["fc.weight"] = torch.cat((torch.zeros(half, WIDTH), solve(states_of(2), code)))
    tensors[f"{block}.self_attn.q_proj.weight"].zero_()
    tensors[f"{block}.self_attn.v_proj.weight"] = torch.diag(torch.cat((torch.zeros(half), torch.ones(half))))
    read = torch.cat((torch.zeros(len(CYCLE), half), code), 1)
    tensors[f"{block}.self_attn.o_proj.weight"] = 0.01 * solve(normed(read), normed(last_states().roll(-1, 0)))


DRAFTERS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], None]]] = {
    "medusa": ({"num_heads": 3, "num_layers": 0, "own_heads": True}, solve_medusa),
    "mtp": ({}, solve_mtp),
    "eagle": ({"variant": 1}, solve_eagle1),
    "eagle3": ({"taps": (0, 1, 2)}, solve_eagle3),
    "dflash": (
        {"num_layers": 1, "taps": (2,), "window": 1, "window_from": "anchor", "block_size": K + 1, "mask_token": MASK},
        solve_dflash,
    ),
}
"""Method -> options of its drafter, and what solves its weights."""


def lay_down(path: Path, method: str) -> Path:
    """A drafter that knows the cycle, as a directory without config.json: a recipe says how it is read."""
    options, solved = DRAFTERS[method]
    info = discover()["eagle" if method.startswith("eagle") else method]
    config = info.config.model_validate(options)
    context = SourceContext(TargetTables(TARGET), K, info.dependency[0])  # type: ignore[arg-type]
    assert info.trainable is not None
    tensors = {name: part.clone() for name, part in info.trainable(config, context, SeededTensors(1)).state().items()}
    solved(tensors)
    path.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def recipe_of(method: str, weights: Path, **options: Any) -> Recipe:
    """A recipe with the drafter; options here may read it otherwise than it was made."""
    chain = {"shape": "chain"} if method == "medusa" else {}
    named = {} if method == "eagle3" else DRAFTERS[method][0]
    taps = {"taps": [0, 1, 2]} if method == "eagle3" else {}
    draft = {"method": method, "k": K, "weights": str(weights), **chain, **named, **taps, **options}
    return parse_recipe({"draft": {key: value for key, value in draft.items() if key != "variant"}})


def write_config(path: Path, **options: Any) -> None:
    write_json_atomic(path / "config.json", options)
