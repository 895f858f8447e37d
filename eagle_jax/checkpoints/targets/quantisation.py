"""Reads from config.json how weights are quantised. Methods and keys without support are errors that name them."""

from __future__ import annotations

import re
from typing import NamedTuple

from eagle_jax.checkpoints.files.fields import Fields, shown

KEYS = ("quantization_config", "compression_config")
"""Names of the object in config.json; the second is of old compressed-tensors."""
_METHODS = ("awq", "compressed-tensors", "fp8", "gptq")
_FLOATS = "Load the original checkpoint, with weights= to quantise it here."
_ROTATED = re.compile(r"rotat|hadamard|quarot|spin_?quant|online_had|transform_config", re.IGNORECASE)
# Keys without effect on what the tensors mean, of each method. The tensors themselves say which layers are quantised.
_HARMLESS = {
    "gptq": {
        "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "model_name_or_path",
        "model_file_base_name", "meta", "act_group_aware", "lm_head", "backend", "tokenizer", "dataset",
        "block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize", "batch_size",
        "pad_token_id", "max_input_length", "cache_block_outputs", "use_exllama", "disable_exllama", "exllama_config",
        "use_cuda_fp16", "model_seqlen", "desc_act", "sym", "mse", "version",
    },
    "awq": {
        "modules_to_not_convert", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config", "backend",
        "desc_act", "sym",
    },
    "fp8": {"modules_to_not_convert", "ignored_layers", "dequantize"},
    "compressed-tensors": {"ignore", "quantization_status", "global_compression_ratio", "version"},
}  # fmt: skip
_HARMLESS_WEIGHTS = {"actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype", "symmetric"}


class Quantisation(NamedTuple):
    """Holds what a config.json says about quantised weights.

    Attributes:
      method: `quant_method`.
      bits: of a value, for GPTQ and AWQ. group: inputs of a group; None is all.
      block: rows and columns of a block of fp8, or None.
      zeros_minus_one: GPTQ's first format stores zero points minus one.
      notes: sentences about what is read in another way than its project computes it.
    """

    method: str
    bits: int = 8
    group: int | None = None
    block: tuple[int, int] | None = None
    zeros_minus_one: bool = False
    notes: tuple[str, ...] = ()


def quantisation_of(fields: Fields) -> Quantisation | None:
    """Returns how the weights of a model are quantised; None if they are not.

    Raises:
      CheckpointError: an unknown method; a rotation, which changes the hidden states that heads read; or a key or value
        that is not supported.
    """
    _check_rotation(fields)
    key = next((key for key in KEYS if fields.values.get(key)), None)
    if key is None:
        return None
    own = fields.mapping(key)
    _check_rotation(own)
    method = own.text("quant_method")
    if method not in _METHODS:
        own.fail("quant_method", f"one of {', '.join(_METHODS)}", _FLOATS)
    return {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed}[method](own)


def _check_rotation(fields: Fields) -> None:
    for key, value in fields.values.items():
        if value and _ROTATED.search(key):
            fields.fail(
                key, "absent",
                "Load a checkpoint that was quantised without a rotation (QuaRot, SpinQuant): draft heads read hidden "
                "states, which a rotation changes.",
            )  # fmt: skip


def _check_known(fields: Fields, *known: str, harmless: set[str]) -> None:
    """Checks that every key is known; null, false and empty values turn an unknown key off."""
    for key, value in fields.values.items():
        if value and key not in {"quant_method", *known, *harmless}:
            fields.fail(key, "absent", f"It is unknown here. {_FLOATS}")


def _group(fields: Fields, default: int | None = None, key: str = "group_size") -> int | None:
    if fields.values.get(key, default) in (-1, None):
        return None
    return fields.integer(key, default)


def _gptq(own: Fields) -> Quantisation:
    _check_known(own, "bits", "group_size", "checkpoint_format", "format", "pack_dtype", harmless=_HARMLESS["gptq"])
    bits = own.integer("bits")
    if bits not in (4, 8):
        own.fail("bits", "4 or 8", _FLOATS)
    if own.text("pack_dtype", "int32") != "int32":
        own.fail("pack_dtype", "int32", _FLOATS)
    key = "checkpoint_format" if own.given("checkpoint_format") else "format"
    layout = own.text(key, "gptq", null=True)
    if layout not in ("gptq", "gptq_v2"):
        own.fail(key, "gptq or gptq_v2", _FLOATS)
    return Quantisation("gptq", bits, _group(own, 128), zeros_minus_one=layout == "gptq")


def _awq(own: Fields) -> Quantisation:
    bits, group = ("w_bit", "q_group_size") if own.given("q_group_size") else ("bits", "group_size")  # of llm-awq
    _check_known(own, bits, group, "zero_point", "version", "format", harmless=_HARMLESS["awq"])
    if own.integer(bits, 4) != 4:
        own.fail(bits, "4", _FLOATS)
    if not own.flag("zero_point", True):
        own.fail("zero_point", "true", _FLOATS)
    key = "version" if own.given("version") else "format"
    if own.text(key, "gemm", null=True).lower() != "gemm":
        own.fail(key, "gemm", _FLOATS)
    return Quantisation("awq", 4, _group(own, 128, group))


def _fp8(own: Fields) -> Quantisation:
    _check_known(own, "activation_scheme", "weight_block_size", "fmt", "scale_fmt", harmless=_HARMLESS["fp8"])
    if own.text("fmt", "e4m3", null=True) not in ("e4m3", "float8_e4m3fn"):
        own.fail("fmt", "e4m3", _FLOATS)
    scheme = own.text("activation_scheme", "dynamic")
    block = own.ids("weight_block_size")
    if len(block) not in (0, 2) or any(size < 1 for size in block):
        own.fail("weight_block_size", "two positive integers or null")
    note = _weight_only(own, "activation_scheme", scheme)
    return Quantisation("fp8", block=(block[0], block[1]) if block else None, notes=(note,))


def _weight_only(fields: Fields, key: str, value: object) -> str:
    return (
        f"{fields.where}: {fields.inside}{key} is {shown(value)}, but activations are not quantised here: the weights "
        "are read as they are, and the text is that of quantised weights alone"
    )


def _compressed(own: Fields) -> Quantisation:
    harmless = _HARMLESS["compressed-tensors"]
    _check_known(own, "format", "config_groups", "kv_cache_scheme", "sparsity_config", harmless=harmless)
    sparsity = own.mapping("sparsity_config")
    if sparsity.values and sparsity.text("format") != "dense":
        sparsity.fail("format", "dense", _FLOATS)
    notes, sizes, blocks = [], set(), set()
    if own.values.get("kv_cache_scheme"):
        notes.append(f"{own.where}: {own.inside}kv_cache_scheme is ignored: the cache is not quantised here")
    groups = own.mapping("config_groups")
    _check_format(own)
    for name in groups.values:
        group = groups.mapping(name)
        _check_known(group, "targets", "weights", "input_activations", "output_activations", "format", harmless=set())
        _check_format(group)
        weights = group.mapping("weights")
        known = ("num_bits", "type", "strategy", "group_size", "block_structure", "dynamic")
        _check_known(weights, *known, harmless=_HARMLESS_WEIGHTS)
        kind = weights.text("type", "int"), weights.integer("num_bits", 8)
        if kind not in (("int", 4), ("int", 8), ("float", 8)):
            weights.fail("num_bits", "4 or 8 of type int, or 8 of type float", _FLOATS)
        strategy = weights.text("strategy", "tensor", null=True)
        if strategy not in ("tensor", "channel", "group", "block"):
            weights.fail("strategy", "tensor, channel, group or block", _FLOATS)
        if strategy == "group":
            sizes.add(weights.integer("group_size"))
        if strategy == "block":
            sides = weights.ids("block_structure")
            if len(sides) != 2 or min(sides) < 1:
                weights.fail("block_structure", "the rows and columns of a block, two positive numbers", _FLOATS)
            blocks.add((sides[0], sides[1]))
        for key in ("input_activations", "output_activations"):
            if group.values.get(key):
                notes.append(_weight_only(group, key, group.values[key]))
    if len(sizes) > 1 or len(blocks) > 1:
        own.fail("config_groups", "groups of weights with one group_size", _FLOATS)
    return Quantisation(
        "compressed-tensors", group=next(iter(sizes), None), block=next(iter(blocks), None), notes=tuple(notes)
    )


def _check_format(fields: Fields) -> None:
    formats = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"
    if fields.given("format") and fields.text("format") not in formats:
        fields.fail("format", f"one of {', '.join(formats)}", _FLOATS)
