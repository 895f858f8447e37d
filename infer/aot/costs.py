"""Counts what a program costs before it runs: products and stored arrays from its jaxpr, transfers from its HLO.

The compiler's own cost analysis counts the body of a loop once, and adds on-chip traffic to the bytes accessed. Here
loops are multiplied by their turns, and the bytes are those of the stored arrays that products read: weights and
caches. Activations of a decoding cycle stay on the chip. A weight that the compiler keeps on the chip for several
levels of drafting counts once per level: where a device holds little of a model, it reads less than is counted here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Var

ITEMSIZE = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
HOST = ("infeed", "outfeed", "send", "recv")
SAME_ARRAY = frozenset((
    "broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "dynamic_update_slice", "expand_dims",
    "reshape", "scatter", "sharding_constraint", "slice", "squeeze", "transpose",
))  # fmt: skip
"""Primitives whose result is a view, a part or an update of their first operand."""


class ProductCosts(NamedTuple):
    """Costs of all matrix products.

    Attributes:
      flops: floating-point operations of all devices together, a multiply-add counted as two.
      bytes: stored operands that one device reads.
    """

    flops: float
    bytes: float


def product_costs(jaxpr: Any, shares: Sequence[float]) -> ProductCosts:
    """Adds up all matrix products of a program, every turn of a loop of known length.

    A `while` loop (of unknown length) counts as one turn, a `cond` as its dearest branch.

    Args:
      shares: of every input the part that one device holds; 0 for an input that is not stored in HBM.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    stored = {var: share for var, share in zip(jaxpr.invars, shares, strict=True) if share}
    flops = read = 0.0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        own = [stored.get(var, 0.0) if isinstance(var, Var) else 0.0 for var in eqn.invars]
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            flops += 2.0 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            read += sum(
                share * var.aval.size * var.aval.dtype.itemsize for var, share in zip(eqn.invars, own, strict=True)
            )
        elif name in SAME_ARRAY and own[0]:
            stored[eqn.outvars[0]] = own[0]
        inner = []
        for sub in _sub_jaxprs(eqn):
            count = len(getattr(sub, "jaxpr", sub).invars)
            # The inputs of most programs are those of the equation; a `cond` has its index before them.
            passed = own[len(own) - count :] if len(own) - count in (0, 1) else [0.0] * count
            inner.append(product_costs(sub, passed))
        if inner:
            flops_of, read_of = zip(*inner, strict=True)
            total, turns = (max if name == "cond" else sum), eqn.params.get("length", 1)
            flops, read = flops + turns * total(flops_of), read + turns * total(read_of)
    return ProductCosts(flops, read)


def loop_lengths(jaxpr: Any) -> dict[str, int]:
    """Returns the length of every loop of known length by the end of its name in the HLO (`draft/while`)."""
    found = {}
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "scan":
            found[f"{eqn.source_info.name_stack}/while".removeprefix("/")] = eqn.params["length"]
        for sub in _sub_jaxprs(eqn):
            found |= loop_lengths(sub)
    return found


def _sub_jaxprs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(item, "jaxpr", item), "eqns"):
                yield item


class Instruction(NamedTuple):
    """One line of HLO.

    Attributes:
      result: type and layout of its result. rest: operands, attributes and metadata.
      source: the name of the JAX operation that it comes from, with the loops around it.
    """

    name: str
    opcode: str
    result: str
    rest: str
    source: str

    def sizes(self) -> list[float]:
        """Returns the bytes of every array of the result."""
        arrays = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", self.result)
        return [
            ITEMSIZE.get(dtype, 0) * float(math.prod(map(int, filter(None, dims.split(","))))) for dtype, dims in arrays
        ]


def instructions(text: str, source: str = "") -> Iterator[Instruction]:
    """Yields the instructions of optimised HLO whose source contains `source`."""
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        match = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ?\b([a-z][a-z-]*)\((.*)", line)
        if match is not None:
            name, result, opcode, rest = match.groups()
            origin = re.search(r'op_name="([^"]*)"', rest)
            found = Instruction(name, opcode, result, rest, origin.group(1) if origin else "")
            if source in found.source:
                yield found


class Collective(NamedTuple):
    """Communication between devices.

    Attributes:
      bytes: of its result on one device. times: how often it runs. looped: whether a loop repeats it.
    """

    kind: str
    bytes: float
    times: int
    looped: bool


def collectives(text: str, lengths: Mapping[str, int], within: str = "") -> list[Collective]:
    """Lists the communication of a program, or of its loop body `within`.

    The compiler writes a collective that runs beside products into several fusions; its channel tells them apart.

    Args:
      lengths: turns of loops, see `loop_lengths`.
    """
    found, channels = [], set()
    for one in instructions(text, within):
        kind = one.opcode.removesuffix("-start")
        channel = re.search(r"channel_id=(\d+)", one.rest)
        if kind not in COLLECTIVES or (channel and channel.group(1) in channels):
            continue
        channels |= {channel.group(1)} if channel else set()
        inner = one.source.partition(within)[2] if within else one.source
        times = math.prod(length for loop, length in lengths.items() if f"{loop}/body" in inner)
        size = max(one.sizes()) if one.opcode.endswith("-start") else sum(one.sizes())
        found.append(Collective(kind, size, times, "while/body" in inner))
    return found


def host_transfers(text: str) -> list[str]:
    """Lists the instructions that exchange data with the host or call it."""
    target = re.compile(r'custom_call_target="[^"]*(callback|host)', re.IGNORECASE)
    return [one.name for one in instructions(text) if one.opcode in HOST or target.search(one.rest)]


def copies(text: str, dims: Sequence[int], within: str = "") -> list[str]:
    """Lists the instructions that copy a whole array of these sizes in HBM, in any order of axes."""
    wanted = sorted(size for size in dims if size > 1)
    found = []
    for one in instructions(text, within):
        sizes = re.search(r"\[([\d,]*)\]", one.result)
        same = (
            sizes and sorted(size for size in map(int, filter(None, sizes.group(1).split(","))) if size > 1) == wanted
        )
        if one.opcode == "copy" and same and "S(" not in one.result:  # S(1) is VMEM
            found.append(one.name)
    return found
