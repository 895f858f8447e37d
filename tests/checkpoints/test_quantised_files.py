"""Checks quantised checkpoints: packed by the published rules here, one value at a time, and read by ours."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors.torch import save_file

from eagle_jax import generate, load_target
from eagle_jax.checkpoints import CheckpointError, load_target_checkpoint, save_target_checkpoint
from eagle_jax.checkpoints.files.mapping import flatten
from eagle_jax.checkpoints.targets.config import decoder_config
from eagle_jax.config import DecoderConfig, ExpertsConfig
from eagle_jax.models import presets
from eagle_jax.models.quantised import dequantise, is_quantised
from tests.checkpoints.common import GPT2, LLAMA, QWEN2, assert_same, edit_json, quiet, random_params

CONFIG = DecoderConfig(
    vocab_size=24, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    max_position=64,
)  # fmt: skip
GROUP = 16
GEMMA = {
    "vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 8, "max_position": 64, "windows": (8, 0), "query_scalar": 8,
}  # fmt: skip


def pack(values: np.ndarray, bits: int, axis: int, places=None) -> np.ndarray:
    """Packs unsigned values into int32 along an axis, the first in the lowest bits, or each at its place."""
    moved, count = np.moveaxis(values.astype(np.uint32), axis, 0), 32 // bits
    packed = np.zeros((-(-len(moved) // count), *moved.shape[1:]), np.uint32)
    for index, row in enumerate(moved):
        place = index % count if places is None else places.index(index % count)
        packed[index // count] |= row << np.uint32(bits * place)
    return np.ascontiguousarray(np.moveaxis(packed, 0, axis)).view(np.int32)


def integers(shape, bits, seed):
    return np.random.default_rng(seed).integers(0, 2**bits, shape)


def scales(shape, seed=1):
    """Half-precision scales, as the projects store them; some of every row differ."""
    return np.random.default_rng(seed).uniform(0.01, 0.02, shape).astype(np.float16)


def gptq(shape, bits=4, plus=0, order=None, symmetric=True):
    """`QuantLinear.pack` of AutoGPTQ: zero points minus one (plus=1: the second format, as they are)."""
    outputs, inputs = shape
    groups = np.arange(inputs) // GROUP if order is None else order
    count = groups.max() + 1
    values, scale = integers(shape, bits, 2), scales((outputs, count))
    zero = np.full((outputs, count), 2 ** (bits - 1)) if symmetric else integers((outputs, count), bits, 3)
    floats = (values - zero[:, groups]) * scale.astype(np.float32)[:, groups]
    stored = (zero - 1 + plus) % 2**bits
    return floats, {
        "qweight": pack(values.T, bits, 0), "qzeros": pack(stored.T, bits, 1), "scales": scale.T.copy(),
        "g_idx": groups.astype(np.int32),
    }  # fmt: skip


def awq(shape):
    """`WQLinear_GEMM.from_linear` of AutoAWQ: place i of an int32 holds column (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    outputs, inputs = shape
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    values, zero = integers(shape, 4, 4), integers((outputs, inputs // GROUP), 4, 5)
    scale = scales(zero.shape)
    floats = (values - np.repeat(zero, GROUP, 1)) * np.repeat(scale.astype(np.float32), GROUP, 1)
    parts = {"qweight": pack(values.T, 4, 1, order), "qzeros": pack(zero.T, 4, 1, order), "scales": scale.T.copy()}
    return floats, parts


def packed(shape, bits=4, group=GROUP, zero_points=False):
    """`pack_to_int32` of compressed-tensors: plus half the range; zero points packed along the outputs."""
    outputs, inputs = shape
    half, count = 2 ** (bits - 1), 1 if group is None else inputs // group
    values, scale = integers(shape, bits, 6) - half, scales((outputs, count))
    zero = integers(scale.shape, bits, 7) - half if zero_points else np.zeros(scale.shape, int)
    floats = (values - np.repeat(zero, inputs // count, 1)) * np.repeat(scale.astype(np.float32), inputs // count, 1)
    parts = {"weight_packed": pack(values + half, bits, 1), "weight_scale": scale, "weight_shape": np.array(shape)}
    return floats, parts | ({"weight_zero_point": pack(zero + half, bits, 0)} if zero_points else {})


def int8(shape, per_tensor=False):
    values = integers(shape, 8, 8).astype(np.int8)
    scale = scales((1,) if per_tensor else (shape[0], 1))
    return values * scale.astype(np.float32), {"weight": values, "weight_scale": scale, "input_scale": scale[:1].copy()}


def int8_shifted(shape):
    """One scale and one zero point for a whole tensor."""
    floats, parts = int8(shape, True)
    shift = parts["weight_scale"].astype(np.float32) * 5
    return floats - shift, parts | {"weight_zero_point": np.array([5], np.int8)}


def fp8(shape, block=None):
    """Per output channel, or per block, whose last row and column may be cut."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    sizes = (1, shape[1]) if block is None else block
    scale = torch.from_numpy(scales([-(-size // part) for size, part in zip(shape, sizes, strict=True)])).float()
    wide = scale.repeat_interleave(sizes[0], 0)[: shape[0]].repeat_interleave(sizes[1], 1)[:, : shape[1]]
    name = "weight_scale" if block is None else "weight_scale_inv"
    return (values.float() * wide).numpy(), {"weight": values, name: scale}


def compressed(bits=4, kind="int", strategy="group", activations=None, **more):
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": GROUP, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"], **more}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "damp_percent": 0.01}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [8, 16]}
DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
# name: (quantization_config, how a weight of a shape is stored, dtype of q or None where it is dequantised, warning)
CASES = {
    "gptq": (GPTQ, gptq, "int4", None),
    "gptq-8": (GPTQ | {"bits": 8}, lambda s: gptq(s, 8), "int8", None),
    "gptq-asymmetric": (GPTQ | {"sym": False}, lambda s: gptq(s, symmetric=False), "int4", None),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda s: gptq(s, plus=1, symmetric=False), "int4", None),
    "gptq-act-order": (
        GPTQ | {"desc_act": True},
        lambda s: gptq(s, order=np.random.default_rng(9).permutation(np.arange(s[1]) // GROUP)),
        None, "not equal runs of neighbouring inputs",
    ),
    "awq": (AWQ, awq, "int4", None),
    "packed-int4": (compressed(format="pack-quantized"), packed, "int4", None),
    "packed-channel": (compressed(strategy="channel"), lambda s: packed(s, group=None), "int4", None),
    "packed-asymmetric": (compressed(), lambda s: packed(s, zero_points=True), "int4", None),
    "packed-int8": (compressed(8), lambda s: packed(s, 8), "int8", None),
    "int8": (compressed(8, strategy="channel", activations=DYNAMIC), int8, "int8", "activations are not quantised"),
    "int8-tensor": (compressed(8, strategy="tensor"), lambda s: int8(s, True), "int8", None),
    "int8-tensor-asymmetric": (compressed(8, strategy="tensor"), int8_shifted, "int8", None),
    "fp8-channel": (compressed(8, "float", "channel"), fp8, "float8_e4m3fn", None),
    "fp8-blocks": (BLOCKS, lambda s: fp8(s, (8, 16)), "float8_e4m3fn", "activations are not quantised"),
}  # fmt: skip


def write(directory, settings, store, config=CONFIG, biases=False):
    """Writes a model whose layers are quantised; returns its parameters, dequantised."""
    params = random_params(config)
    save_target_checkpoint(config, params, directory, "float32")
    edit_json(directory / "config.json", quantization_config=settings)
    file = directory / "model.safetensors"
    tensors = {name: torch.from_numpy(array) for name, array in safetensors.numpy.load_file(file).items()}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        floats, parts = store(tuple(tensors.pop(name).shape))
        layer = name.removesuffix(".weight")
        tensors |= {f"{layer}.{part}": torch.as_tensor(array) for part, array in parts.items()}
        if biases:
            tensors[f"{layer}.bias"] = torch.zeros(len(floats), dtype=torch.float16)
        _, number, block, projection = layer.removeprefix("model.").split(".")
        params[f"layers_{number}"][block][projection]["weight"] = jnp.asarray(floats, jnp.float32)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return params


@pytest.mark.parametrize("case", CASES)
def test_a_quantised_checkpoint_is_read_exactly(case, tmp_path):
    settings, store, dtype, warning = CASES[case]
    expected = write(tmp_path, settings, store, biases=case == "gptq")  # AutoGPTQ writes zero biases
    if warning is None:
        with quiet():
            _, params = load_target_checkpoint(tmp_path)
    else:
        with pytest.warns(UserWarning, match=warning):
            _, params = load_target_checkpoint(tmp_path)
    weight = params["layers_0"]["mlp"]["down_proj"]["weight"]
    assert (weight["q"].dtype.name if is_quantised(weight) else None) == dtype
    assert (is_quantised(weight) and "zero" in weight) == (
        case in ("awq", "gptq-asymmetric", "gptq-v2", "packed-asymmetric", "int8-tensor-asymmetric")
    )
    ours = jax.tree.map(dequantise, params, is_leaf=is_quantised)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), ours, expected)


FUSED = dataclasses.replace(CONFIG, architecture="Phi3ForCausalLM")
MIXTURE = dataclasses.replace(
    CONFIG, architecture="Qwen3MoeForCausalLM", num_layers=2, qk_norm=True,
    experts=ExpertsConfig(num_experts=4, top_k=2, intermediate_size=32, normalise=True, dense_layers=(0,)),
)  # fmt: skip


@pytest.mark.parametrize("case", ["gptq", "gptq-act-order", "awq", "packed-asymmetric", "int8", "fp8-blocks"])
@pytest.mark.parametrize("config", [FUSED, MIXTURE], ids=["phi3", "qwen3-moe"])
def test_joined_projections_and_experts_are_read_quantised(config, case, tmp_path):
    """Equal to the float checkpoint of the same values. Experts with one scale per output stay small."""
    settings, store, dtype, _ = CASES[case]
    save_target_checkpoint(config, random_params(config), tmp_path / "floats", "float32")
    shutil.copytree(tmp_path / "floats", tmp_path / "small")
    edit_json(tmp_path / "small" / "config.json", quantization_config=settings)
    name = "model.safetensors"
    floats = safetensors.numpy.load_file(tmp_path / "floats" / name)
    small = {key: torch.from_numpy(array) for key, array in floats.items()}
    for key in [key for key in floats if key.endswith("_proj.weight")]:
        floats[key], parts = store(tuple(small.pop(key).shape))
        small |= {f"{key.removesuffix('weight')}{part}": torch.as_tensor(array) for part, array in parts.items()}
        if case == "gptq":
            small[key.removesuffix("weight") + "bias"] = torch.zeros(len(floats[key]), dtype=torch.float16)
    save_file({key: torch.as_tensor(array).float().contiguous() for key, array in floats.items()},
              tmp_path / "floats" / name)  # fmt: skip
    save_file({key: tensor.contiguous() for key, tensor in small.items()}, tmp_path / "small" / name)
    expected = load_target_checkpoint(tmp_path / "floats")[1]
    is_grouped = config is MIXTURE and case not in ("int8", "gptq-act-order")
    with pytest.warns(UserWarning, match="experts are quantised in groups") if is_grouped else contextlib.nullcontext():
        params = load_target_checkpoint(tmp_path / "small")[1]
    mlp = params["layers_1"]["mlp"]["experts"] if config is MIXTURE else params["layers_0"]["mlp"]
    for weight, kind in (
        (params["layers_0"]["self_attn"]["k_proj"]["weight"], dtype),
        (mlp["up_proj"]["weight"], None if is_grouped else dtype),
    ):
        assert (weight["q"].dtype.name if is_quantised(weight) else None) == kind
    ours = jax.tree.map_with_path(
        lambda path, leaf: (
            leaf["q"] * leaf["scale"][..., None] if is_quantised(leaf) and "experts" in str(path) else dequantise(leaf)
        ),
        params, is_leaf=is_quantised,
    )  # fmt: skip
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), ours, expected)
    if config is FUSED:  # rows 32 to 47, after the queries
        keys = floats["model.layers.0.self_attn.qkv_proj.weight"][32:48]
        np.testing.assert_allclose(ours["layers_0"]["self_attn"]["k_proj"]["weight"], keys, rtol=1e-6)
    if case == "int8":
        out = generate(load_target(tmp_path / "small"), None, [[1, 2, 3]], max_new_tokens=4, eos_ids=())
        assert (
            out.tokens
            == generate(load_target(tmp_path / "floats"), None, [[1, 2, 3]], max_new_tokens=4, eos_ids=()).tokens
        )


def test_the_rest_of_a_quantised_checkpoint_can_be_quantised_on_loading(tmp_path):
    write(tmp_path, AWQ, awq)
    _, stored = load_target_checkpoint(tmp_path)
    _, params = load_target_checkpoint(tmp_path, weights="int8")
    assert_same(params["layers_0"], stored["layers_0"])
    assert params["lm_head"]["weight"]["q"].dtype == params["embed_tokens"]["embedding"]["q"].dtype == jnp.int8
    assert params["norm"]["scale"].dtype == jnp.float32


def test_an_embedding_in_groups_is_dequantised(tmp_path):
    """A model looks up whole rows of it."""
    write(tmp_path, compressed(), packed)
    file = tmp_path / "model.safetensors"
    tensors = {name: torch.from_numpy(array) for name, array in safetensors.numpy.load_file(file).items()}
    floats, parts = packed(tuple(tensors.pop("model.embed_tokens.weight").shape))
    tensors |= {f"model.embed_tokens.{part}": torch.as_tensor(array) for part, array in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    target = load_target(tmp_path)
    np.testing.assert_allclose(target.params["embed_tokens"]["embedding"], floats, rtol=1e-6)
    assert len(generate(target, None, [[1, 2]], max_new_tokens=3, eos_ids=()).tokens[0]) == 3
    assert load_target(tmp_path, weights="int4").params["embed_tokens"]["embedding"]["q"].dtype == jnp.int8


def test_the_text_model_of_images_may_state_its_quantisation_inside(tmp_path):
    whole, config = tmp_path / "whole", dataclasses.replace(presets.model("gemma-3-270m"), **GEMMA)
    write(whole, compressed(), packed, config)
    values = json.loads((whole / "config.json").read_text())
    _, expected = load_target_checkpoint(whole)
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    for inside in (values, {key: value for key, value in values.items() if key != "quantization_config"}):
        given = outer | {"text_config": inside}
        if inside is not values:
            given["quantization_config"] = values["quantization_config"]
        (whole / "config.json").write_text(json.dumps(given))
        assert_same(load_target_checkpoint(whole)[1], expected)


def test_a_saved_target_has_float_weights(tmp_path):
    save_target_checkpoint(CONFIG, random_params(CONFIG), tmp_path / "floats", "float32")
    config, params = load_target_checkpoint(tmp_path / "floats", weights="int8")
    with pytest.raises(CheckpointError, match=r"floats to be written, got quantised ones in .*without weights="):
        save_target_checkpoint(config, params, tmp_path / "again")


def test_a_damaged_quantised_checkpoint_is_an_error(tmp_path):
    write(tmp_path, AWQ, awq)
    file = tmp_path / "model.safetensors"
    whole = safetensors.numpy.load_file(file)
    name = "model.layers.0.mlp.up_proj"
    changes = {
        rf"{name}\.qweight needs {name}\.scales, which is missing": {f"{name}.scales": None},
        rf"{name}\.scales must be one of float32.*got int32": {f"{name}.scales": whole[f"{name}.qzeros"]},
        rf"{name}\.weight holds 1 value that is not finite": {f"{name}.scales": whole[f"{name}.scales"] * 1},
        rf"{name}\.weight is \[40, 32\], expected \[48, 32\]": {f"{name}.qweight": whole[f"{name}.qweight"][:, :5]},
    }
    for message, change in changes.items():
        tensors = {key: value for key, value in (whole | change).items() if value is not None}
        if "finite" in message:
            tensors[f"{name}.scales"][0, 0] = np.inf
        safetensors.numpy.save_file(tensors, file)
        with pytest.raises(CheckpointError, match=message):
            load_target_checkpoint(tmp_path)


MISFITS = {
    "awq-whole": (AWQ | {"group_size": -1}, awq, r"scales of \S+ must be \[\d+, 1\] by the groups"),
    "awq-small": (AWQ | {"group_size": 8}, awq, r"scales of \S+ must be \[\d+, 6\]"),
    "gptq": (GPTQ | {"group_size": 32}, gptq, r"scales of .*got \[\d+, \d\]\. Correct quantization_config"),
    "packed": (compressed(strategy="channel"), packed, r"scales of \S+ must be \[\d+, 1\]"),
    "block-rows": (BLOCKS | {"weight_block_size": [16, 16]}, lambda s: fp8(s, (8, 16)), r"rows of scales of .* got "),
    "block-columns": (BLOCKS | {"weight_block_size": [8, 8]}, lambda s: fp8(s, (8, 16)), r"scales of \S+ must be \["),
    "no-block": (BLOCKS | {"weight_block_size": None}, lambda s: fp8(s, (8, 16)), r"rows of scales .* must be 1 or "),
    "g-idx": (GPTQ, lambda s: (gptq(s)[0], shifted(gptq(s)[1])), "g_idx of .* must be below "),
}  # fmt: skip


def shifted(parts):
    return parts | {"g_idx": parts["g_idx"] + 1}


@pytest.mark.filterwarnings("ignore:.*activations are not quantised")
@pytest.mark.parametrize("case", MISFITS)
def test_groups_that_the_scales_do_not_have_are_an_error(case, tmp_path):
    settings, store, message = MISFITS[case]
    write(tmp_path, settings, store)
    with pytest.raises(CheckpointError, match=message):
        load_target_checkpoint(tmp_path)


def test_names_of_llm_awq_state_the_group(tmp_path):
    write(tmp_path, {"quant_method": "awq", "w_bit": 4, "q_group_size": GROUP, "zero_point": True}, awq)
    _, params = load_target_checkpoint(tmp_path)
    assert params["layers_0"]["mlp"]["up_proj"]["weight"]["q"].shape[-1] == GROUP


def test_floats_under_a_quantised_config_are_said(tmp_path):
    save_target_checkpoint(CONFIG, random_params(CONFIG), tmp_path, "float32")
    edit_json(tmp_path / "config.json", quantization_config=GPTQ)
    with pytest.warns(UserWarning, match="describes quantised weights, and the tensors are floats"):
        load_target_checkpoint(tmp_path)


ROTATION = {"R1": {"type": "hadamard", "apply": []}}
REFUSED = [
    ({"quant_method": "bitsandbytes"}, r"quantization_config\.quant_method must be one of awq, .* got 'bitsandbytes'"),
    (GPTQ | {"bits": 3}, r"bits must be 4 or 8, got 3\. Load the original checkpoint, with weights="),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format must be gptq or gptq_v2, got 'marlin'"),
    (GPTQ | {"dynamic": {"+:.*": {}}}, r"quantization_config\.dynamic must be absent.*unknown here"),
    (GPTQ | {"pack_dtype": "int16"}, "pack_dtype must be int32, got 'int16'"),
    (AWQ | {"version": "gemv"}, "version must be gemm, got 'gemv'"),
    (AWQ | {"zero_point": False}, "zero_point must be true, got False"),
    (AWQ | {"bits": 8}, "bits must be 4, got 8"),
    (BLOCKS | {"fmt": "e5m2"}, "fmt must be e4m3, got 'e5m2'"),
    (BLOCKS | {"weight_block_size": [128]}, "weight_block_size must be two positive integers or null"),
    (compressed(format="nvfp4-pack-quantized"), "format must be one of pack-quantized, .*got 'nvfp4"),
    (compressed(2), r"config_groups\.group_0\.weights\.num_bits must be 4 or 8 of type int, .*got 2"),
    (compressed(4, "float"), "num_bits must be 4 or 8 of type int"),
    (compressed(strategy="tensor_group"), "strategy must be tensor, channel, group or block, got 'tensor_group'"),
    (compressed(8, "float", "block"), "block_structure must be the rows and columns of a block, .* got no value"),
    (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "format must be dense, got 'sparse-24"),
    (compressed(new_thing=1), r"new_thing must be absent, got 1\. It is unknown here"),
    (compressed(transform_config=ROTATION), "transform_config must be absent.*without a rotation.*draft heads read"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_an_unsupported_quantisation_is_refused_by_name(settings, message):
    with pytest.raises(CheckpointError, match=message):
        decoder_config(LLAMA | {"quantization_config": settings}, "config.json")


def test_more_refusals():
    with pytest.raises(CheckpointError, match=r"use_quarot must be absent, got True.*without a rotation"):
        decoder_config(LLAMA | {"use_quarot": True}, "config.json")
    with pytest.raises(
        CheckpointError, match=r"quantised weights must not be of gpt2, got quantization_config. Load the float"
    ):
        decoder_config(json.loads(json.dumps(GPT2_VALUES)) | {"quantization_config": GPTQ}, "config.json")
    decoder_config(QWEN2 | {"compression_config": compressed()}, "config.json")  # the old name of the key
    with pytest.raises(CheckpointError, match="weights must be one of int8, int4, fp8 or None, got 'int3'"):
        load_target("anywhere", weights="int3")


GPT2_VALUES = {
    "architectures": ["GPT2LMHeadModel"], "vocab_size": GPT2.vocab_size, "n_embd": 16, "n_head": 4, "n_layer": 2,
}  # fmt: skip


def test_every_part_of_a_quantised_weight_is_in_the_tree(tmp_path):
    write(tmp_path, AWQ, awq)
    names = {name.rpartition("/")[2] for name in flatten(load_target_checkpoint(tmp_path)[1])}
    assert names == {"q", "scale", "zero", "weight", "embedding"}
