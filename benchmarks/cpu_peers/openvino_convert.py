"""The embedded model as OpenVINO IR: stateful, as `openvino_genai.LLMPipeline` takes it.

Inputs: input_ids, attention_mask, position_ids [batch, rows], beam_idx [batch]. Output: logits [batch, rows, vocab].
Keys and values are states inside the model, reordered by beam_idx.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import nncf
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino._offline_transformations import apply_make_stateful_transformation
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

__all__ = ["convert"]

TOKENS = ("input_ids", "attention_mask", "position_ids")


class _WithCache(torch.nn.Module):
    """The model with its cache as plain tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any) -> Any:
        rows, context = input_ids.shape[1], attention_mask.shape[1]  # new rows, past and new
        order = torch.arange(context)
        causal = order[None, :] <= order[context - rows :, None]  # [rows, context]
        mask = causal[None, None] & attention_mask[:, None, None, :].to(torch.bool)
        bias = torch.where(mask, 0.0, torch.finfo(torch.float32).min)  # [batch, 1, rows, context]
        cache = DynamicCache()
        cache.layers = [_layer(*pair) for pair in zip(past[::2], past[1::2], strict=True)]
        made = self.model(
            input_ids=input_ids, attention_mask=bias, position_ids=position_ids, past_key_values=cache, use_cache=True
        )
        present = [tensor for layer in made.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return (made.logits, *present)


def _layer(keys: Any, values: Any) -> Any:
    """A filled layer: one that fills itself begins with a tensor of another rank, which cannot be converted."""
    layer = DynamicLayer()
    layer.keys, layer.values, layer.is_initialized = keys, values, True
    layer.dtype, layer.device = keys.dtype, keys.device
    return layer


def convert(source: Path, target: Path, weights: str) -> None:
    """Write one IR. `weights` is float32, or int8: one scale and zero point a row, weights only."""
    model = AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float32, attn_implementation="sdpa").eval()
    config = model.config
    heads, width = config.num_key_value_heads, config.head_dim
    past = [torch.zeros(2, heads, 3, width) for _ in range(2 * config.num_hidden_layers)]
    example = (torch.ones(2, 4, dtype=torch.long), torch.ones(2, 7, dtype=torch.long), torch.arange(3, 7).expand(2, 4))
    with torch.no_grad():
        converted = ov.convert_model(_WithCache(model), example_input=(*example, *past))
    _name(converted, heads, width)
    _make_stateful(converted, heads, width)
    if weights == "int8":
        converted = nncf.compress_weights(converted, mode=nncf.CompressWeightsMode.INT8_ASYM)
    target.mkdir(parents=True, exist_ok=True)
    ov.save_model(converted, target / "openvino_model.xml", compress_to_fp16=False)
    AutoConfig.from_pretrained(str(source)).save_pretrained(str(target))


def _name(model: Any, heads: int, width: int) -> None:
    for index, port in enumerate(model.inputs):
        name = TOKENS[index] if index < 3 else f"past.{index - 3}"
        port.get_tensor().set_names({name})
        node = port.get_node()
        node.set_friendly_name(name)
        node.set_partial_shape(ov.PartialShape([-1, -1] if index < 3 else [-1, heads, -1, width]))
        node.set_element_type(ov.Type.i64 if index < 3 else ov.Type.f32)
    for index, port in enumerate(model.outputs):
        port.get_tensor().set_names({"logits" if index == 0 else f"present.{index - 1}"})
    model.validate_nodes_and_infer_types()


def _make_stateful(model: Any, heads: int, width: int) -> None:
    beams = ops.parameter(name="beam_idx", dtype=ov.Type.i32, shape=ov.PartialShape([-1]))
    beams.output(0).get_tensor().add_names({"beam_idx"})
    model.add_parameters([beams])
    pairs = {}
    for index in range(len(model.inputs) - 4):
        port = model.input(f"past.{index}")
        readers = list(port.get_target_inputs())
        ordered = ops.gather(port, beams, ops.constant(0, dtype=ov.Type.i64))
        for reader in readers:
            reader.replace_source_output(ordered.output(0))
        pairs[f"past.{index}"] = f"present.{index}"
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, pairs)
    shape = ops.shape_of(model.input("input_ids"), output_type="i64")
    batch = ops.gather(shape, ops.constant([0], dtype=ov.Type.i64), ops.constant(0, dtype=ov.Type.i64))
    rest = ops.constant([heads, 0, width], dtype=ov.Type.i64)
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            empty = ops.broadcast(ops.constant(0.0, dtype=ov.Type.f32), ops.concat([batch, rest], axis=0))
            node.set_arguments([empty])
    model.validate_nodes_and_infer_types()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("weights", choices=("float32", "int8"))
    options = parser.parse_args()
    convert(options.source, options.target, options.weights)
