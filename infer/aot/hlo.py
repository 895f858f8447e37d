"""The text of optimised HLO, read as far as costs need it."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

BYTES: dict[str, float] = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8,
    "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip
"""Of one element."""


class Buffer(NamedTuple):
    """One array of an instruction's result. `hbm` is false where the compiler placed it on the chip."""

    dtype: str
    dims: tuple[int, ...]
    hbm: bool

    @property
    def size(self) -> float:
        """Bytes, without the padding of its tiles."""
        return float(BYTES.get(self.dtype, 0) * math.prod(self.dims))

    @property
    def bytes(self) -> float:
        """Bytes in HBM."""
        return self.size if self.hbm else 0.0


class Instruction(NamedTuple):
    """One line of HLO. `rest` is what follows the operands: attributes and metadata."""

    name: str
    opcode: str
    buffers: tuple[Buffer, ...]
    operands: tuple[str, ...]
    rest: str
    root: bool

    def attribute(self, key: str) -> str:
        """The value of `key=...`, without the percent sign of a computation; empty where there is none."""
        match = re.search(rf'{key}="?%?([^\s,}}"]+)', self.rest)
        return match.group(1) if match else ""


Computation = dict[str, Instruction]


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Instructions by name, by name of the computation; and the name of the computation where the program starts."""
    computations: dict[str, Computation] = {}
    entry, current = "", Computation()
    for line in text.splitlines():
        if line.endswith("{") and (start := re.match(r"(ENTRY )?%?([\w.-]+) \(", line)):
            current = computations[start.group(2)] = {}
            entry = start.group(2) if start.group(1) else entry
        elif (instruction := _parse(line)) is not None:
            current[instruction.name] = instruction
    return computations, entry


def through_bitcasts(one: Instruction, body: Computation) -> Instruction:
    """What `one` is another view of."""
    while one.opcode == "bitcast":
        one = body[one.operands[0]]
    return one


def product_flops(one: Instruction, body: Computation) -> float:
    """Of a `dot` or `convolution`, a multiply-add counted as two; nothing falls on padding or between dilated rows."""
    left, right = (body[name].buffers[0].dims for name in one.operands)
    outputs = one.buffers[0].dims
    if one.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)
        shared = [int(axis) for axis in contracted.group(1).split(",") if axis] if contracted else []
        return 2.0 * math.prod(outputs) * math.prod(left[axis] for axis in shared)
    lhs, rhs, out = re.split(r"_|->", one.attribute("dim_labels"))
    window = dict(re.findall(r"(\w+)=(\S+)", (re.findall(r"window=\{([^}]*)\}", one.rest) or [""])[0]))
    axes = [label for label in out if label.isdigit()]
    setting = lambda name, default: window[name].split("x") if name in window else [default] * len(axes)  # noqa: E731
    total = 2.0 * outputs[out.index("b")] * outputs[out.index("f")] * right[rhs.index("i")]
    for label, stride, pad, base, kernel in zip(
        axes, setting("stride", "1"), setting("pad", "0_0"), setting("lhs_dilate", "1"), setting("rhs_dilate", "1"),
        strict=True,
    ):  # fmt: skip
        rows, low = left[lhs.index(label)], int(pad.partition("_")[0])
        total *= sum(
            0 <= at <= (rows - 1) * int(base) and at % int(base) == 0
            for position in range(outputs[out.index(label)])
            for step in range(right[rhs.index(label)])
            for at in (position * int(stride) + step * int(kernel) - low,)
        )
    return total


def _parse(line: str) -> Instruction | None:
    match = re.match(r"\s+(ROOT )?%?([\w.-]+) = (.*)", re.sub(r"/\*.*?\*/", "", line))
    if match is None:
        return None
    text = match.group(3)
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    opcode, _, tail = text[end:].strip().partition("(")
    close = _closing("(" + tail) - 1
    inside, rest = tail[:close], tail[close + 1 :]
    buffers = tuple(
        Buffer(dtype, tuple(int(size) for size in dims.split(",") if size), "S(" not in layout)
        for dtype, dims, layout in re.findall(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?", text[:end])
    )
    if opcode in ("parameter", "constant"):
        rest = f"{inside}){rest}"
    return Instruction(
        match.group(2), opcode, buffers, tuple(re.findall(r"%([\w.-]+)", inside)), rest, bool(match.group(1))
    )


def _closing(text: str) -> int:
    """Index of the bracket that closes the one at index 0."""
    level = 0
    for index, character in enumerate(text):
        level += (character == "(") - (character == ")")
        if level == 0:
            return index
    raise ValueError(f"unbalanced brackets in {text[:80]!r}")
