"""Numerics of both targets against transformers, and against themselves in every way a round uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import (
    ADAPTED,
    ALL,
    CPU,
    NATIVE,
    gap,
    make_adapter,
    make_model,
    make_native,
    make_target,
    make_tokens,
    prefill,
    prefilled,
    score,
)
from torch import nn

from specflow.errors import CheckpointError, ModelError
from specflow.target import transformer
from specflow.target.architecture import recurrent_reason
from specflow.target.base import Target, TargetOptions
from specflow.target.huggingface import HuggingFaceTarget, load_huggingface
from specflow.target.transformer import NativeTarget
from specflow.types import Skip

TINY = 1e-4
EXACT = {"native": 1e-9, "adapter": 1e-5, "onnx": TINY, "openvino": TINY}
"""Largest difference in float64; models of transformers compute norms and softmax in float32 whatever their type, and
ONNX Runtime and OpenVINO compute all in float32."""
OURS = [(runtime, family) for runtime in ("native", "onnx") for family in NATIVE]
OURS += [("openvino", family) for family in ("llama_biases_tied", "qwen2_mixed", "qwen3", "smollm3")]
BOTH = OURS + [("adapter", family) for family in ALL]
SOME = [
    ("native", "llama3_rope"),
    ("native", "qwen2_mixed"),
    ("native", "smollm3"),
    ("onnx", "llama3_rope"),
    ("onnx", "qwen2_mixed"),
    ("onnx", "smollm3"),
    ("openvino", "qwen2_mixed"),
    ("adapter", "mistral_window"),
    ("adapter", "gemma3_mixed"),
    ("adapter", "gpt2"),
    ("adapter", "gpt_neox"),
]
TREE = ((-1, 0, 0, 1, 1, 3), ((0, 1, 3, 5), (0, 1, 4), (0, 2)))  # parents of rows 1.. among rows; paths


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def tree_mask(parents: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows seen by rows [1, M, M], and depths [M]; row 0 is the root."""
    rows = len(parents)
    mask, depth = torch.eye(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.int64)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
            depth[row] = depth[parent] + 1
    return mask.unsqueeze(0), depth


class TestAgainstTransformers:
    @pytest.mark.parametrize(("runtime", "family"), BOTH)
    def test_logits_of_a_whole_prompt(self, runtime: str, family: str) -> None:
        tokens = make_tokens(41)
        expected = make_model(family)(tokens).logits
        target = make_target(runtime, family)
        out = score(target, tokens, target.new_cache(1, 64))
        assert gap(out.logits, expected) <= TINY
        assert float(expected.abs().max()) > 0.1

    @pytest.mark.parametrize(("runtime", "family"), BOTH)
    def test_chunked_prefill_then_several_rows(self, runtime: str, family: str) -> None:
        tokens = make_tokens(40, seed=1)
        expected = make_model(family)(tokens).logits
        target = make_target(runtime, family)
        cache = target.new_cache(1, 64)
        done = prefill(target, tokens[:, :23], cache, chunk=7)
        assert gap(done, expected[:, :23]) <= TINY
        assert gap(score(target, tokens[:, 23:], cache).logits, expected[:, 23:]) <= TINY

    @pytest.mark.parametrize(("runtime", "family"), BOTH)
    def test_taps_are_outputs_of_layers(self, runtime: str, family: str) -> None:
        tokens = make_tokens(20, seed=2)
        plain = make_model(family)(tokens, output_hidden_states=True)
        target = make_target(runtime, family)
        out = score(target, tokens, target.new_cache(1, 64), taps=(-1, 0, 1, 2))
        for layer in (-1, 0, 1):
            assert gap(out.taps[layer], plain.hidden_states[layer + 1]) <= TINY
        # transformers records the last layer after the final norm.
        assert gap(out.hidden_post, plain.hidden_states[-1]) <= TINY
        assert torch.equal(out.taps[2], out.hidden_pre)
        assert gap(out.hidden_pre, out.hidden_post) > 1e-3

    @pytest.mark.parametrize(("runtime", "family"), SOME)
    @pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
    def test_half_types_stay_near(self, runtime: str, family: str, dtype: torch.dtype, near: float) -> None:
        if runtime == "openvino" or (runtime == "onnx" and dtype == torch.bfloat16):
            return  # refused on CPUs: tests/unit/test_opening.py
        tokens = make_tokens(30, seed=3)
        expected = make_model(family)(tokens).logits
        target = make_target(runtime, family, dtype)
        logits = prefill(target, tokens, target.new_cache(1, 64), chunk=11)
        assert logits.dtype == dtype
        assert gap(logits, expected) <= near * float(expected.abs().max())

    @pytest.mark.parametrize(("runtime", "family"), SOME)
    def test_last_row_only(self, runtime: str, family: str) -> None:
        target = make_target(runtime, family)
        tokens = make_tokens(12)
        whole = score(target, tokens, target.new_cache(1, 64)).logits
        last = score(target, tokens, target.new_cache(1, 64), rows="last").logits
        assert whole is not None
        assert gap(last, whole[:, -1:]) <= 1e-5


class TestBatches:
    @pytest.mark.parametrize(("runtime", "family"), BOTH)
    def test_ragged_rows_equal_batch_one(self, runtime: str, family: str) -> None:
        target = make_target(runtime, family, torch.float64)
        prompts = [make_tokens(length, seed=length) for length in (5, 21, 12)]
        tokens = torch.cat([make_tokens(6, seed=50 + row) for row in range(3)])
        together = score(target, tokens, prefilled(target, prompts), taps=(1,))
        for row, prompt in enumerate(prompts):
            alone = score(target, tokens[row : row + 1], prefilled(target, [prompt]), taps=(1,))
            assert gap(together.logits[row], alone.logits[0]) <= EXACT[runtime]
            assert gap(together.taps[1][row], alone.taps[1][0]) <= EXACT[runtime]

    @pytest.mark.parametrize(("runtime", "family"), SOME)
    def test_select_and_clear(self, runtime: str, family: str) -> None:
        target = make_target(runtime, family, torch.float64)
        prompts = [make_tokens(length, seed=length) for length in (5, 21, 12)]
        cache = prefilled(target, prompts)
        cache.select([2, 0])
        assert list(cache.lengths) == [12, 5]
        cache.clear(0)
        score(target, prompts[1], cache.row(0), rows="last")
        cache.row(0).keep([21])
        assert list(cache.lengths) == [21, 5]
        tokens = torch.cat([make_tokens(4, seed=60 + row) for row in range(2)])
        found = score(target, tokens, cache).logits
        expected = score(target, tokens, prefilled(target, [prompts[1], prompts[0]])).logits
        assert gap(found, expected) <= EXACT[runtime]

    @pytest.mark.parametrize(("runtime", "family"), SOME)
    def test_pad_tokens_disturb_no_other_row(self, runtime: str, family: str) -> None:
        target = make_target(runtime, family, torch.float64)
        tokens = torch.cat([make_tokens(5, seed=1), make_tokens(5, seed=2)])
        padded = tokens.clone()
        padded[1, 2:] = -1
        prompts = [make_tokens(9), make_tokens(14)]
        full, short = (score(target, each, prefilled(target, prompts)).logits for each in (tokens, padded))
        assert gap(full[0], short[0]) <= EXACT[runtime]
        assert gap(full[1, :2], short[1, :2]) <= EXACT[runtime]


class TestTrees:
    @pytest.mark.parametrize(("runtime", "family"), BOTH)
    def test_tree_equals_each_path(self, runtime: str, family: str) -> None:
        target = make_target(runtime, family, torch.float64)
        parents, paths = TREE
        mask, depth = tree_mask(parents)
        prompts = [make_tokens(8, seed=4), make_tokens(17, seed=5)]
        tokens = torch.cat([make_tokens(6, seed=7), make_tokens(6, seed=8)])
        cache = prefilled(target, prompts)
        out = target.forward(tokens, torch.tensor(cache.lengths).unsqueeze(1) + depth, cache, mask=mask)
        for path in paths:
            chain = score(target, tokens[:, list(path)], prefilled(target, prompts))
            assert gap(out.logits[:, list(path)], chain.logits) <= EXACT[runtime]

    @pytest.mark.parametrize(("runtime", "family"), BOTH)
    def test_a_kept_path_equals_a_fresh_prefill(self, runtime: str, family: str) -> None:
        target = make_target(runtime, family, torch.float64)
        parents, _ = TREE
        mask, depth = tree_mask(parents)
        prompts = [make_tokens(8, seed=4), make_tokens(17, seed=5)]
        tokens = torch.cat([make_tokens(6, seed=7), make_tokens(6, seed=8)])
        cache = prefilled(target, prompts)
        target.forward(tokens, torch.tensor(cache.lengths).unsqueeze(1) + depth, cache, mask=mask)
        cache.keep([4, 2], torch.tensor([[0, 1, 3, 5], [0, 2, -1, -1]]))
        after = torch.cat([make_tokens(3, seed=9), make_tokens(3, seed=10)])
        kept = [torch.cat((prompts[0], tokens[:1, [0, 1, 3, 5]]), 1), torch.cat((prompts[1], tokens[1:, [0, 2]]), 1)]
        assert list(cache.lengths) == [12, 19]
        expected = score(target, after, prefilled(target, kept)).logits
        assert gap(score(target, after, cache).logits, expected) <= EXACT[runtime]

    @pytest.mark.parametrize("runtime", ["native", "onnx", "openvino"])
    def test_a_path_is_kept_beyond_the_slots_of_a_new_cache(self, runtime: str) -> None:
        target = make_target(runtime, "llama_biases_tied", torch.float64, max_position_embeddings=700)
        mask, depth = tree_mask(TREE[0])
        prompt, tokens = make_tokens(510, seed=4), make_tokens(6, seed=7)
        cache = prefilled(target, [prompt], capacity=600)
        target.forward(tokens, 510 + depth.unsqueeze(0), cache, mask=mask)
        cache.keep([4], torch.tensor([[0, 1, 3, 5]]))
        kept = torch.cat((prompt, tokens[:, [0, 1, 3, 5]]), 1)
        after = make_tokens(3, seed=9)
        expected = score(target, after, prefilled(target, [kept], capacity=600)).logits
        assert gap(score(target, after, cache).logits, expected) <= EXACT[runtime]

    @pytest.mark.parametrize("runtime", ["native", "adapter", "onnx"])
    def test_windows_are_measured_in_positions_not_in_slots(self, runtime: str) -> None:
        target = make_target(runtime, "mistral_window", torch.float64, sliding_window=2)
        mask, depth = tree_mask((-1, 0, 0, 2, 3))
        prompt, tokens = make_tokens(5), make_tokens(5, seed=1)
        tree = target.forward(tokens, 5 + depth.unsqueeze(0), prefilled(target, [prompt]), mask=mask)
        chain = score(target, tokens[:, [0, 2, 3, 4]], prefilled(target, [prompt]))
        assert gap(tree.logits[:, [0, 2, 3, 4]], chain.logits) <= EXACT[runtime]

    def test_each_batch_row_may_have_its_own_tree(self) -> None:
        target = make_target("native", "qwen2_mixed", torch.float64)
        chain, fork = tree_mask((-1, 0, 1)), tree_mask((-1, 0, 0))
        prompts = [make_tokens(8, seed=4), make_tokens(17, seed=5)]
        tokens = torch.cat([make_tokens(3, seed=7), make_tokens(3, seed=8)])
        positions = torch.tensor([[8], [17]]) + torch.stack([chain[1], fork[1]])
        mask = torch.cat([chain[0], fork[0]])
        out = target.forward(tokens, positions, prefilled(target, prompts), mask=mask)
        for row in range(2):
            one, cache = slice(row, row + 1), prefilled(target, [prompts[row]])
            alone = target.forward(tokens[one], positions[one], cache, mask=mask[one])
            assert gap(out.logits[row], alone.logits[0]) <= EXACT["native"]


class TestRollback:
    @pytest.mark.parametrize(("runtime", "family"), BOTH)
    def test_next_rows_equal_a_fresh_prefill(self, runtime: str, family: str) -> None:
        """Rejected rows leave nothing, also where the sliding window moves past them."""
        target = make_target(runtime, family, torch.float64)
        prompt, block = make_tokens(6, seed=1), make_tokens(8, seed=2)
        cache = prefilled(target, [prompt])
        score(target, block, cache)
        cache.keep([3])
        kept = torch.cat((prompt, block[:, :3]), dim=1)
        for step in range(3):
            after = make_tokens(5, seed=20 + step)
            expected = score(target, after, prefilled(target, [kept])).logits
            assert gap(score(target, after, cache).logits, expected) <= EXACT[runtime]
            cache.keep([4])
            kept = torch.cat((kept, after[:, :4]), dim=1)

    @pytest.mark.parametrize(("runtime", "family"), SOME)
    def test_keeping_nothing_changes_nothing(self, runtime: str, family: str) -> None:
        target = make_target(runtime, family, torch.float64)
        cache = prefilled(target, [make_tokens(6)])
        before = score(target, make_tokens(4, seed=3), cache).logits
        score(target, make_tokens(7, seed=4), cache)
        cache.keep([0])
        assert gap(score(target, make_tokens(4, seed=3), cache).logits, before) <= EXACT[runtime]


class TestPartsOfTheModel:
    @pytest.mark.parametrize(("runtime", "family"), BOTH)
    def test_two_ranges_equal_the_whole(self, runtime: str, family: str) -> None:
        target = make_target(runtime, family, torch.float64)
        prompt, tokens = make_tokens(11), make_tokens(4, seed=1)
        whole = score(target, tokens, prefilled(target, [prompt]))
        cache = target.new_cache(1, 64)
        for piece in (prompt, tokens):
            lower = score(target, piece, cache, layers=(0, 1))
            upper = score(target, piece, cache, layers=(1, 3), hidden_in=lower.hidden_pre, taps=(1,))
            cache.keep([piece.shape[1]])
        assert gap(upper.logits, whole.logits) <= EXACT[runtime]
        assert gap(lower.logits, whole.logits) > 1e-3  # an early exit has its own logits
        assert set(upper.taps) == {1}

    @pytest.mark.parametrize("runtime", ["native", "onnx", "openvino"])
    def test_two_ranges_have_the_bits_of_the_whole(self, runtime: str) -> None:
        """Early exits verify in two parts what plain decoding computes in one."""
        target, tokens = make_target(runtime, "llama_biases_tied"), make_tokens(7)
        cache = target.new_cache(1, 64)
        whole = score(target, tokens, cache)
        lower = score(target, tokens, cache, layers=(0, 1))
        upper = score(target, tokens, cache, layers=(1, 3), hidden_in=lower.hidden_pre)
        assert torch.equal(upper.logits, whole.logits)

    @pytest.mark.parametrize("runtime", ["onnx", "openvino"])
    def test_nothing_but_mlps(self, runtime: str) -> None:
        """No layer then reads or writes slots."""
        skip, tokens = Skip(attention=frozenset({0, 1, 2})), make_tokens(7)
        target, plain = (make_target(each, "llama_biases_tied") for each in (runtime, "native"))
        found = score(target, tokens, target.new_cache(1, 64), skip=skip).logits
        assert gap(found, score(plain, tokens, plain.new_cache(1, 64), skip=skip).logits) <= TINY

    @pytest.mark.parametrize(("runtime", "family"), OURS + [("adapter", f) for f in ADAPTED])
    def test_skipping_equals_zeroed_branches(self, runtime: str, family: str) -> None:
        target = make_target(runtime, family, torch.float64)
        skip = Skip(attention=frozenset({1}), mlp=frozenset({0, 1}))
        tokens, cache = make_tokens(13), target.new_cache(1, 64)
        whole = score(target, tokens, cache).logits
        found = score(target, tokens, cache, skip=skip).logits
        expected = zeroed(make_model(family).double(), skip)(tokens).logits
        assert gap(found, expected) <= 1e-5
        assert gap(found, whole) > 1e-3
        assert gap(score(target, tokens, cache).logits, whole) <= EXACT[runtime]  # nothing stays skipped

    def test_skipping_is_undone_when_a_pass_fails(self) -> None:
        target = make_target("adapter", "gpt2", torch.float64)
        tokens, cache = make_tokens(13), target.new_cache(1, 64)
        whole = score(target, tokens, cache).logits
        with pytest.raises((IndexError, RuntimeError)):
            target.forward(tokens, torch.full_like(tokens, 9999), cache, skip=Skip(frozenset({0, 1, 2})), taps=(0,))
        assert gap(score(target, tokens, cache).logits, whole) <= EXACT["native"]

    def test_layers_without_an_mlp_of_their_own_refuse_to_skip(self) -> None:
        from transformers import OPTConfig, OPTForCausalLM

        sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2}
        target = make_adapter(OPTForCausalLM(OPTConfig(vocab_size=64, num_attention_heads=2, **sizes)))
        with pytest.raises(ModelError, match="no MLP sub-module"):
            score(target, make_tokens(3), target.new_cache(1, 16), skip=Skip(mlp=frozenset({0})))


def zeroed(model: Any, skip: Skip) -> Any:
    """The model with some branches made to yield nothing: their last linear is zero, bias and all."""
    stack = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for chosen, endings in (
        (skip.attention, ("self_attn.o_proj", "attn.c_proj", "attention.dense")),
        (skip.mlp, ("mlp.down_proj", "mlp.c_proj", "mlp.dense_4h_to_h")),
    ):
        for index in chosen:
            last = [module for name, module in stack[index].named_modules() if name in endings]
            assert len(last) == 1
            for parameter in last[0].parameters():
                parameter.data.zero_()
    return model


class TestNativeLoading:
    def tensors(self, family: str = "llama3_rope") -> tuple[Any, dict[str, torch.Tensor]]:
        model = make_model(family)
        return model.config, dict(model.state_dict())

    def load(self, config: Any, tensors: dict[str, torch.Tensor], **options: Any) -> NativeTarget:
        return NativeTarget(config, tensors, TargetOptions("tiny", torch.float32, CPU, **options))

    def test_missing_tensor_is_named(self) -> None:
        config, tensors = self.tensors()
        del tensors["model.layers.1.mlp.up_proj.weight"]
        with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            self.load(config, tensors)

    def test_wrong_shape_is_named(self) -> None:
        config, tensors = self.tensors()
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(3, 3)
        with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_proj\.weight has shape \(3, 3\)"):
            self.load(config, tensors)

    def test_left_over_tensor_is_named(self) -> None:
        config, tensors = self.tensors()
        tensors["model.layers.0.adapter.weight"] = torch.zeros(3)
        with pytest.raises(CheckpointError, match=r"model\.layers\.0\.adapter\.weight"):
            self.load(config, tensors)

    def test_one_bias_of_three_is_named(self) -> None:
        config, tensors = self.tensors("llama_biases_tied")
        del tensors["model.layers.2.self_attn.v_proj.bias"]
        with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.v_proj\.bias"):
            self.load(config, tensors)

    def test_dynamic_rope_is_refused(self) -> None:
        model = make_model("llama3_rope", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
        with pytest.raises(ModelError, match="dynamic"):
            make_native(model)

    def test_another_family_is_refused(self) -> None:
        with pytest.raises(ModelError, match="gpt2"):
            make_native(make_model("gpt2"))

    def test_row_invariance_that_cannot_hold_is_refused(self) -> None:
        with pytest.raises(ModelError, match=r"target\.row_invariant"):
            make_native(make_model("qwen3"), torch.float64, row_invariant=True)

    def test_facts(self) -> None:
        info = make_target("native", "qwen3").info
        assert (info.vocab_size, info.hidden_size, info.num_layers, info.context_length) == (64, 64, 3, 256)
        assert (info.runtime, info.stop_ids, info.dtype) == ("native", (2,), torch.float32)


class TestAdapterLoading:
    def options(self, **options: Any) -> TargetOptions:
        return TargetOptions("tiny", torch.float32, CPU, (2,), **options)

    @pytest.mark.parametrize("family", ["gemma2", "gpt2"])
    def test_directory(self, family: str, tmp_path: Path) -> None:
        model = make_model(family)
        model.save_pretrained(tmp_path)
        target = load_huggingface(tmp_path, self.options())
        tokens = make_tokens(15)
        assert gap(score(target, tokens, target.new_cache(1, 32)).logits, model(tokens).logits) <= TINY
        assert (target.info.runtime, target.info.exactness) == ("transformers", "tie-exact")
        assert (target.info.num_layers, target.info.hidden_size, target.info.context_length) == (3, 64, 256)

    def test_missing_tensor_is_named(self, tmp_path: Path) -> None:
        model = make_model("olmo2")
        tensors = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
        model.save_pretrained(tmp_path, state_dict=tensors)
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight"):
            load_huggingface(tmp_path, self.options())

    def test_no_model_in_the_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="cannot load"):
            load_huggingface(tmp_path, self.options())

    def test_row_invariance_is_not_promised(self, tmp_path: Path) -> None:
        make_model("gpt2").config.save_pretrained(tmp_path)
        with pytest.raises(ModelError, match="cannot promise"):
            load_huggingface(tmp_path, self.options(row_invariant=True))

    def test_recurrent_models_are_refused_before_their_weights_are_read(self, tmp_path: Path) -> None:
        from transformers import MambaConfig

        config = MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1)
        assert "mamba" in recurrent_reason(config)
        config.save_pretrained(tmp_path)
        with pytest.raises(ModelError, match="cannot be rolled back"):
            load_huggingface(tmp_path, self.options())

    def test_a_model_without_explicit_positions_is_refused(self) -> None:
        from transformers import BloomConfig, BloomForCausalLM

        model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
        with pytest.raises(ModelError, match="position_ids"):
            HuggingFaceTarget(model, self.options())

    def test_a_model_that_misreads_the_mask_is_refused(self) -> None:
        """Positions that follow cache slots look right on chains; the ragged tree tried at loading finds them out."""
        model = make_model("gpt2")
        table = model.transformer.wpe

        class BySlot(nn.Module):
            def forward(self, positions: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = table(positions[:, :1] + torch.arange(positions.shape[1]))
                return out

        model.transformer.wpe = BySlot()
        with pytest.raises(ModelError, match="ragged tree"):
            HuggingFaceTarget(model, self.options())

    def test_context_ends_where_rotary_frequencies_would_change(self) -> None:
        dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 48}
        assert make_adapter(make_model("llama3_rope", rope_parameters=dynamic)).info.context_length == 48


def test_adapter_hooks_the_layers_only_where_they_are_tapped(monkeypatch: pytest.MonkeyPatch) -> None:
    target, tokens, registered = make_adapter(make_model("llama3_rope")), make_tokens(4), []
    plain = nn.Module.register_forward_hook
    monkeypatch.setattr(
        nn.Module,
        "register_forward_hook",
        lambda self, *args, **kw: registered.append(self) or plain(self, *args, **kw),
    )
    bare = score(target, tokens, target.new_cache(1, 8))
    assert registered == []
    tapped = score(target, tokens, target.new_cache(1, 8), taps=(1,))
    assert len(registered) == 1
    assert torch.equal(bare.hidden_pre, tapped.hidden_pre)
    assert torch.equal(bare.hidden_post, tapped.hidden_post)
    assert list(tapped.taps) == [1]


@pytest.mark.parametrize(
    ("family", "windows"), [("llama3_rope", {None}), ("mistral_window", {9}), ("qwen2_mixed", {None, 7})]
)
def test_a_plan_is_made_only_for_kinds_of_layers_there_are(
    family: str, windows: set[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, made, plain = make_native(make_model(family)), [], transformer.plan_attention

    def plan(*args: Any) -> Any:
        made.append(args[3])
        return plain(*args)

    monkeypatch.setattr(transformer, "plan_attention", plan)
    score(target, make_tokens(3), target.new_cache(1, 8))
    assert len(made) == len(windows)
    assert set(made) == windows


def test_both_targets_follow_the_protocol() -> None:
    for runtime in ("native", "adapter"):
        target: Target = make_target(runtime, "llama3_rope")
        cache = target.new_cache(2, 10)
        assert cache.capacity >= 10
        assert list(cache.lengths) == [0, 0]
