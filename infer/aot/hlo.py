"""Reads the text of optimised HLO, as far as costs need it."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "f8e4m3fn": 1,
         "f8e5m2": 1} | {f"{sign}{bits}": bits / 8 for sign in "su" for bits in (8, 16, 32, 64)}  # fmt: skip
"""Bytes of one element."""


class Buffer(NamedTuple):
    """Holds an array of an instruction's result.

    Attributes:
      size: bytes, without the padding of its tiles. hbm: whether it lies in HBM.
    """

    dtype: str
    dims: tuple[int, ...]
    hbm: bool

    @property
    def size(self) -> float:
        return float(BYTES.get(self.dtype, 0) * math.prod(self.dims))

    @property
    def bytes(self) -> float:
        """Returns the bytes in HBM."""
        return self.size if self.hbm else 0.0


class Instruction(NamedTuple):
    """Holds a line of HLO. `rest` is what follows the operands: attributes and metadata."""

    name: str
    opcode: str
    buffers: tuple[Buffer, ...]
    operands: tuple[str, ...]
    rest: str
    root: bool

    def attribute(self, key: str) -> str:
        """Returns the value of `key=...`, without a percent sign; empty if there is none."""
        match = re.search(rf'{key}="?%?([^\s,}}"]+)', self.rest)
        return match.group(1) if match else ""


Computation = dict[str, Instruction]


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Returns the instructions of every computation by name, and the computation that runs first."""
    computations: dict[str, Computation] = {}
    entry, current = "", Computation()
    for line in text.splitlines():
        if line.endswith("{") and (start := re.match(r"(ENTRY )?%?([\w.-]+) \(", line)):
            current = computations[start.group(2)] = {}
            entry = start.group(2) if start.group(1) else entry
        elif (instruction := _parse(line)) is not None:
            current[instruction.name] = instruction
    return computations, entry


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
    operands = tuple(re.findall(r"%([\w.-]+)", inside))
    return Instruction(match.group(2), opcode, buffers, operands, rest, bool(match.group(1)))


def _closing(text: str) -> int:
    """Returns the index of the bracket that closes the one at index 0."""
    level = 0
    for index, character in enumerate(text):
        level += (character == "(") - (character == ")")
        if level == 0:
            return index
    raise ValueError(f"HLO must have balanced brackets, got {text[:80]!r}. Install an older JAX.")
