"""Splits tensors that hold several projections side by side, and joins them again where a file is written."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eagle_jax.checkpoints.files.tensors import TensorReader, TensorView
from eagle_jax.checkpoints.files.weights import Deferred
from eagle_jax.config import DecoderConfig


class Fused(NamedTuple):
    """A tensor of files that holds several projections.

    Attributes:
      name: the part of the tensor's name that stands for the module. parts: the projections, in their order.
      axis: of the outputs; the last in files that store weights [in, out].
    """

    name: str
    parts: tuple[str, ...]
    axis: int = 0


class FusedReader(TensorView):
    """Reads each fused tensor as its parts, named such as `self_attn.qkv_proj/q_proj.weight`.

    Args:
      inner: reads the files. config: gives the sizes of the parts. fused: the fused tensors.
    """

    def __init__(self, inner: TensorReader, config: DecoderConfig, fused: Sequence[Fused]) -> None:
        super().__init__(inner)
        self._parts: dict[str, tuple[str, int, slice]] = {}
        outputs = _outputs(config)
        for name, (module, parts, axis) in itertools.product(tuple(self.infos), fused):
            if f".{module}." not in name or not (shape := self.infos[name].shape):
                continue
            info, start = self.infos.pop(name), 0
            for part in parts:
                # The last part takes the rest: a tensor of another size does not have the expected shape.
                end = start + outputs[part] if part != parts[-1] else max(shape[axis], start)
                split = name.replace(f".{module}.", f".{module}/{part}.")
                at = axis % len(shape)
                self.infos[split] = info._replace(shape=(*shape[:at], end - start, *shape[at + 1 :]))
                self._parts[split] = (name, at, slice(start, end))
                start = end

    def read(self, name: str) -> Any:
        """Reads a tensor as stored, or one part of a fused tensor, which may be quantised."""
        if name not in self._parts:
            return super().read(name)
        whole, axis, rows = self._parts[name]
        # Values, scales and zero points of a quantised weight begin with the outputs.
        return jax.tree.map(lambda part: part[(slice(None),) * axis + (rows,)], super().read(whole))


def _outputs(config: DecoderConfig) -> dict[str, int]:
    keys = config.num_kv_heads * config.head_dim
    return {
        "q_proj": config.num_heads * config.head_dim, "k_proj": keys, "v_proj": keys,
        "gate_proj": config.intermediate_size, "up_proj": config.intermediate_size,
    }  # fmt: skip


def _side_by_side(parts: Sequence[Any]) -> np.ndarray:
    return np.concatenate([np.asarray(part) for part in parts])


def join_projections(flat: Mapping[str, Any], fused: Sequence[Fused]) -> dict[str, Any]:
    """Returns parameters {path: array} with the projections joined as files hold them, at the module's name."""
    out = dict(flat)
    for path, (module, parts, _) in itertools.product(flat, fused):
        layer, found, leaf = path.partition(f"/{parts[0]}/")
        if found:
            arrays = [out.pop(f"{layer}/{part}/{leaf}") for part in parts]
            shape = (sum(array.shape[0] for array in arrays), *arrays[0].shape[1:])
            out[f"{layer}/{module}/{leaf}"] = Deferred(shape, functools.partial(_side_by_side, arrays))
    return out
