"""Reads models that come quantised: compressed-tensors, GPTQ, AWQ and fp8.

A layer of such a file has several tensors, such as `q_proj.qweight`, `.qzeros` and `.scales`. `QuantisedReader` shows
them as one, `q_proj.weight`, which it reads as a quantised weight of `eagle_jax.models.quantised`.

    compressed-tensors  weight int8 or e4m3 [O, I], weight_scale [O, 1], [O, G] or one number; or weight_packed, int4 or
                        int8 along I in int32, lowest bits first, plus half the range, weight_scale [O, G], weight_shape
    gptq                qweight [I * bits / 32, O], packed along I; qzeros [G, O * bits / 32]; scales [G, O]; g_idx [I]
    awq                 qweight [I, O / 8], packed along O in the order 0 2 4 6 1 3 5 7, as qzeros [G, O / 8]; scales
    fp8                 weight e4m3 [O, I], weight_scale_inv per block of 128 x 128, or one number

Sources: `pack_quantized/base.py` and `naive_quantized` of compressed-tensors 0.20; `QuantLinear.pack` of AutoGPTQ;
`gemm` of AutoAWQ; `integrations/finegrained_fp8.py` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.files.fields import CheckpointError
from eagle_jax.checkpoints.files.tensors import FLOAT_DTYPES, QUANTISED, TensorInfo, TensorReader
from eagle_jax.checkpoints.targets.quantisation import Quantisation

_PARTS = (
    "qweight", "qzeros", "scales", "g_idx", "weight", "weight_packed", "weight_scale", "weight_shape",
    "weight_zero_point", "weight_g_idx", "weight_scale_inv",
)  # fmt: skip
_ANCHORS = {
    "qweight": "scales",
    "weight_packed": "weight_scale",
    "weight_scale": "weight",
    "weight_scale_inv": "weight",
}
"""A tensor that only quantised layers have, and another that they must have."""
_UNREAD = (
    "input_scale",
    "input_zero_point",
    "activation_scale",
    "output_scale",
    "k_scale",
    "v_scale",
    "input_scale_ub",
)
"""Scales of activations and caches, which are not quantised here."""
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in an int32 of each of eight neighbouring columns."""


class Unpacked(NamedTuple):
    """Holds a quantised weight as signed values, before groups become an axis.

    Attributes:
      values: [O, I] int8, or e4m3. bits: of a value.
      scale: [O, G]. zero: [O, G] int8 or None.
      groups: [I], the group of every input; None is in order.
      size: inputs of a group.
    """

    values: np.ndarray
    bits: int
    scale: np.ndarray
    zero: np.ndarray | None
    groups: np.ndarray | None
    size: int


class QuantisedReader(TensorReader):
    """Reads quantised layers as one tensor each, `NAME.weight`: a quantised weight, or float32 where no leaf fits it.

    Args:
      quantisation: what config.json says.

    Attributes:
      layers: NAME.weight -> {part: stored name}, of the quantised layers.
      dequantised: names that were read as float32, because their groups are not equal runs of neighbouring inputs.

    Raises:
      CheckpointError: as `TensorReader`; or a layer lacks a tensor, or a tensor has another dtype.
    """

    def __init__(self, directory: Path, quantisation: Quantisation) -> None:
        super().__init__(directory)
        self._quantisation = quantisation
        self.layers: dict[str, dict[str, str]] = {}
        self.dequantised: list[str] = []
        for name in [*self.infos]:
            layer, _, anchor = name.rpartition(".")
            if f"{layer}.weight_packed" in self.infos:
                anchor = "weight_packed"  # its `weight_scale` has no `weight`
            if anchor in _ANCHORS and name in self.infos:
                parts = {part: f"{layer}.{part}" for part in _PARTS if f"{layer}.{part}" in self.infos}
                self._check(layer, anchor, parts)
                shape = self._shape(parts)
                self.layers[f"{layer}.weight"] = parts
                stored = [self.infos.pop(part) for part in parts.values()]
                self.infos[f"{layer}.weight"] = TensorInfo(shape, QUANTISED, stored[0].file)
            elif anchor in _UNREAD:
                del self.infos[name]

    def read(self, name: str) -> Any:
        """Reads a tensor as stored; a quantised weight as {q, scale} in NumPy, or dequantised to float32."""
        if name not in self.layers:
            return super().read(name)
        parts = {part: super(QuantisedReader, self).read(stored) for part, stored in self.layers[name].items()}
        weight = to_leaf(self._fitting(name, self._unpack(name, parts, self.infos[name].shape)))
        if not isinstance(weight, Mapping):
            self.dequantised.append(name)
        return weight

    def _check(self, layer: str, anchor: str, parts: Mapping[str, str]) -> None:
        needed = _ANCHORS[anchor]
        if needed not in parts or (anchor == "weight_packed" and "weight_shape" not in parts):
            lacking = needed if needed not in parts else "weight_shape"
            raise CheckpointError(
                f"{self.directory}: {layer}.{anchor} needs {layer}.{lacking}, which is missing. Download it again."
            )
        for part in ("scales", "weight_scale", "weight_scale_inv"):
            if part in parts and (dtype := self.infos[parts[part]].dtype) not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"{self.directory}: {parts[part]} must be one of {', '.join(FLOAT_DTYPES)}, got {dtype}. Load a "
                    "checkpoint with such scales."
                )
        if "weight" in parts and (dtype := self.infos[parts["weight"]].dtype) not in ("int8", "float8_e4m3fn"):
            raise CheckpointError(
                f"{self.directory}: {parts['weight']} must be int8 or float8_e4m3fn, got {dtype}. Load another."
            )

    def _shape(self, parts: Mapping[str, str]) -> tuple[int, ...]:
        """Returns [O, I] of a layer."""
        if "qweight" in parts:
            first, second = self.infos[parts["qweight"]].shape
            packed = 32 // self._quantisation.bits
            return (second * packed, first) if self._quantisation.method == "awq" else (second, first * packed)
        if "weight_packed" in parts:
            return tuple(int(size) for size in super().read(parts["weight_shape"]).reshape(-1))
        return self.infos[parts["weight"]].shape

    def _misfit(self, name: str, part: str, wanted: object, found: object) -> CheckpointError:
        return CheckpointError(
            f"{self.directory}: {part} of {name} must be {wanted} by the groups or blocks in config.json, got {found}. "
            "Correct quantization_config."
        )

    def _fitting(self, name: str, weight: Unpacked) -> Unpacked:
        """Checks that scales, zero points and groups have the sizes that config.json states."""
        outputs, inputs = weight.values.shape
        wanted = (outputs, -(-inputs // weight.size))
        for part, array in (("scales", weight.scale), ("zero points", weight.zero)):
            if array is not None and array.shape != wanted:
                raise self._misfit(name, part, list(wanted), list(array.shape))
        if weight.groups is not None and not 0 <= weight.groups.min() <= weight.groups.max() < wanted[1]:
            raise self._misfit(name, "g_idx", f"below {wanted[1]}", weight.groups.max())
        return weight

    def _unpack(self, name: str, parts: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Unpacked:
        outputs, inputs = shape
        if "qweight" in parts:
            return self._unpack_transposed(parts, inputs)
        groups = parts.get("weight_g_idx")
        if "weight_packed" in parts:
            packed, scale = parts["weight_packed"], parts["weight_scale"].reshape(outputs, -1)
            bits = 4 if packed.shape[1] == -(-inputs // 8) else 8
            zero, offset = parts.get("weight_zero_point"), 1 << (bits - 1)
            if zero is not None:
                zero = signed(unpack(zero, bits, axis=0)[:outputs], offset)
            values = signed(unpack(packed, bits, axis=1)[:, :inputs], offset)
        else:
            values, zero, bits = parts["weight"], parts.get("weight_zero_point"), 8
            scale = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
            if self._quantisation.block is not None and scale.ndim == 2 and scale.shape != (outputs, 1):
                rows, columns = self._quantisation.block
                if len(scale) != -(-outputs // rows):
                    raise self._misfit(name, "rows of scales", -(-outputs // rows), len(scale))
                return Unpacked(values, bits, np.repeat(scale, rows, axis=0)[:outputs], None, None, columns)
            for part in (scale, zero):
                if part is not None and part.size != 1 and len(part) != outputs:
                    raise self._misfit(name, "rows of scales", f"1 or {outputs}", len(part))
            scale, zero = _by_row(scale, outputs), None if zero is None else _by_row(zero, outputs)
        size = self._quantisation.group or inputs
        return Unpacked(values, bits, scale, zero, groups, size if scale.shape[1] > 1 else inputs)

    def _unpack_transposed(self, parts: Mapping[str, np.ndarray], inputs: int) -> Unpacked:
        """Unpacks the layouts of GPTQ and AWQ, whose tensors are [I, O]."""
        bits, method = self._quantisation.bits, self._quantisation.method
        offset, scale = 1 << (bits - 1), parts["scales"].T
        if method == "awq":
            values, zeros = (unpack(parts[part], bits, 1, _AWQ_PLACES) for part in ("qweight", "qzeros"))
        else:
            values, zeros = unpack(parts["qweight"], bits, axis=0), unpack(parts["qzeros"], bits, axis=1)
            if self._quantisation.zeros_minus_one:
                zeros = (zeros + 1) & (2**bits - 1)
        zero = signed(zeros.T, offset)
        size = self._quantisation.group or inputs
        return Unpacked(signed(values.T, offset), bits, scale, zero, parts.get("g_idx"), size)


def zero_biases(reader: TensorReader) -> list[str]:
    """Returns the names of biases of quantised layers that are zero: GPTQ writes one where the model has none."""
    layers = (name.removesuffix("weight") for name, info in reader.infos.items() if info.dtype == QUANTISED)
    return [f"{name}bias" for name in layers if f"{name}bias" in reader.infos and not reader.read(f"{name}bias").any()]


def _by_row(part: np.ndarray, outputs: int) -> np.ndarray:
    """Returns scales or zero points, of which a tensor may have one for all rows, as [O, groups]."""
    rows = part.reshape(1, 1) if part.size == 1 else part.reshape(outputs, -1)
    return np.broadcast_to(rows, (outputs, rows.shape[1]))


def unpack(packed: np.ndarray, bits: int, axis: int, places: tuple[int, ...] | None = None) -> np.ndarray:
    """Returns the unsigned values of an array of int32 that are packed along an axis of two, lowest bits first.

    Args:
      places: place in the int32 of each value; None is in order.
    """
    places = places or tuple(range(32 // bits))
    words = np.ascontiguousarray(packed).view(np.uint32)
    parts = [((words >> np.uint32(bits * place)) & np.uint32(2**bits - 1)).astype(np.uint8) for place in places]
    shape = [size * (len(places) if i == axis else 1) for i, size in enumerate(words.shape)]
    return np.stack(parts, axis=axis + 1).reshape(shape)


def signed(values: np.ndarray, offset: int) -> np.ndarray:
    """Returns unsigned values minus half their range, int8."""
    return (values.astype(np.int16) - offset).astype(np.int8)


def to_leaf(weight: Unpacked) -> dict[str, np.ndarray] | np.ndarray:
    """Returns a quantised weight, with groups as an axis; float32 [O, I] if groups are not neighbouring inputs."""
    outputs, inputs = weight.values.shape
    count, order = weight.scale.shape[1], np.arange(inputs) // weight.size
    groups = order if weight.groups is None else weight.groups
    zero = None if weight.zero is None or not weight.zero.any() else weight.zero
    if inputs != count * weight.size or not np.array_equal(groups, order):
        values = weight.values.astype(np.float32) - (0 if zero is None else zero[:, groups])
        return values * weight.scale.astype(np.float32)[:, groups]
    shape = (outputs,) if count == 1 else (outputs, count)
    kind = jnp.int4 if weight.bits == 4 else weight.values.dtype
    leaf = {"q": weight.values.astype(kind).reshape(*shape, -1), "scale": weight.scale.reshape(shape)}
    return leaf if zero is None else leaf | {"zero": zero.reshape(shape)}
