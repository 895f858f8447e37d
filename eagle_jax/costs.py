"""What a program costs before it ever runs: flops from its jaxpr, traffic and transfers from its optimised HLO text.

The compiler's own cost analysis counts the body of a loop once and adds on-chip traffic to `bytes accessed`. Here flops
are counted on the jaxpr, where the lengths of loops are known, and memory traffic is read off the HLO: buffers that the
layout places outside HBM (`S(1)` is VMEM) cost nothing, a slice costs the slice, an update in place costs the update.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

BYTES: dict[str, float] = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8,
    "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip
FREE = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"))
"""Instructions that move nothing."""
FREE_CALLS = frozenset(
    ("ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked")
)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
CALLING = ("fusion", "async-start")
"""Instructions that do what the computation they call does."""
HOST = frozenset(["infeed", "outfeed", "send", "recv"])


def flops(jaxpr: Any) -> float:
    """Floating-point operations of all matrix products, a multiply-add counted as two.

    Loops of known length count every turn, a `while` loop (of unknown length) one turn, a `cond` its dearest branch.
    """
    total = 0.0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)
        inner = [flops(sub) for sub in _sub_jaxprs(eqn)]
        if inner:
            total += max(inner) if eqn.primitive.name == "cond" else sum(inner) * eqn.params.get("length", 1)
    return total


def loop_lengths(jaxpr: Any) -> dict[str, int]:
    """Length of every loop of known length, by the end of its name in the HLO (`draft/while`)."""
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


class Move(NamedTuple):
    """What an instruction does.

    Attributes:
      bytes: it moves to and from HBM in one execution. written: the part of them that it writes.
      times: how often it is executed.
    """

    instruction: Instruction
    bytes: float
    times: int
    written: float = 0.0


class Program:
    """Optimised HLO, parsed as far as costs need it.

    Attributes:
      computations: instructions by name, by name of the computation. entry: where the program starts.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        current: Computation = {}
        for line in text.splitlines():
            if line.endswith("{") and (start := re.match(r"(ENTRY )?%?([\w.-]+) \(", line)):
                current = self.computations[start.group(2)] = {}
                self.entry = start.group(2) if start.group(1) else self.entry
            elif (instruction := _parse(line)) is not None:
                current[instruction.name] = instruction

    def loop_body(self, op_name: str) -> str:
        """The body of the `while` whose name ends with `op_name`.

        Raises:
          ValueError: there is not exactly one.
        """
        every = (one for computation in self.computations.values() for one in computation.values())
        loops = [one for one in every if one.opcode == "while" and one.attribute("op_name").endswith(op_name)]
        if len(loops) != 1:
            raise ValueError(f"{len(loops)} loops of the program are named {op_name!r}, expected one")
        return loops[0].attribute("body")

    def turns(self, loop: Instruction, lengths: Mapping[str, int]) -> int:
        """How often the body of a `while` is executed; 1 where nothing says it.

        Names are asked first. Then the condition, where it is "counter < constant": the counters of `lax.scan` and of the
        compiler's own loops start at 0 and go up by 1.
        """
        name = loop.attribute("op_name")
        fitting = [end for end in lengths if f"/{name}".endswith(f"/{end}")]
        if fitting:
            return lengths[max(fitting, key=len)]
        condition = self.computations.get(loop.attribute("condition"), {})
        for one in condition.values():
            if one.root and one.opcode == "compare" and one.attribute("direction") == "LT":
                bound = condition.get(one.operands[1])
                if bound is not None and bound.opcode == "constant":
                    return int(bound.rest.partition(")")[0])
        return 1

    def moves(self, computation: str, lengths: Mapping[str, int], times: int = 1) -> Iterator[Move]:
        """What one execution of `computation` does, loops and calls unrolled.

        Args:
          lengths: turns of a loop by the end of its name, as `loop_lengths` gives them; see `turns` for the others.
        """
        body = self.computations[computation]
        for one in body.values():
            if one.opcode == "while":
                yield from self.moves(one.attribute("body"), lengths, times * self.turns(one, lengths))
            elif one.opcode in ("call", "conditional"):
                for name in _called(one):
                    yield from self.moves(name, lengths, times)
            elif one.opcode not in FREE and not one.opcode.endswith(("-done", "-update")):
                yield Move(one, self._traffic(one, body), times, self._written(one, body))

    def flops(self, computation: str, lengths: Mapping[str, int]) -> float:
        """Floating-point operations of all products in one execution of `computation`, per device.

        Unlike those of the jaxpr these are what a device does: work that the compiler left on several devices counts.
        """
        total, body = 0.0, self.computations[computation]
        for one in body.values():
            if one.opcode == "while":
                total += self.turns(one, lengths) * self.flops(one.attribute("body"), lengths)
            elif one.opcode in ("call", "conditional"):
                total += max((self.flops(name, lengths) for name in _called(one)), default=0.0)
            elif one.opcode in ("fusion", "async-start"):
                total += self.flops(one.attribute("calls"), lengths)
            elif one.opcode in ("convolution", "dot"):
                total += _product_flops(one, body)
        return total

    def traffic(self, computation: str, lengths: Mapping[str, int]) -> float:
        """Bytes that one execution of `computation` reads from and writes to HBM, per device."""
        return math.fsum(move.bytes * move.times for move in self.moves(computation, lengths))

    def collectives(self, computation: str, lengths: Mapping[str, int]) -> list[Move]:
        """Communication between devices; the bytes are those of the result, wherever it lies."""
        found = []
        for move in self.moves(computation, lengths):
            if move.instruction.opcode.removesuffix("-start") in COLLECTIVES:
                size = max(buffer.size for buffer in move.instruction.buffers)
                found.append(Move(move.instruction, size, move.times))
        return found

    def host_transfers(self) -> list[str]:
        """Names of instructions that exchange data with the host, or call it."""
        found = []
        for computation in self.computations.values():
            for one in computation.values():
                target = one.attribute("custom_call_target").lower()
                if one.opcode.removesuffix("-done") in HOST or "callback" in target or "host" in target:
                    found.append(one.name)
        return found

    def copies(self, computation: str, dims: tuple[int, ...], lengths: Mapping[str, int]) -> list[Move]:
        """Instructions that write a whole array of these sizes to HBM instead of updating it in place."""
        wanted = sorted(size for size in dims if size > 1)
        found = []
        for move in self.moves(computation, lengths):
            one = move.instruction
            outputs = one.buffers[:1] if one.opcode in ("copy-start", "slice-start") else one.buffers
            same = [out for out in outputs if out.hbm and sorted(size for size in out.dims if size > 1) == wanted]
            if same and move.written >= same[0].bytes:
                found.append(move)
        return found

    def _traffic(self, one: Instruction, body: Computation) -> float:
        if one.opcode == "custom-call" and one.attribute("custom_call_target") in FREE_CALLS:
            return 0.0
        if one.opcode == "copy-start":
            return one.buffers[0].bytes + one.buffers[1].bytes
        if one.opcode == "slice-start":
            part = one.buffers[1]
            return part.bytes + (part.size if one.buffers[0].hbm else 0.0)
        read = math.fsum(self._read(one, index, body) for index in range(len(one.operands)))
        return read + self._written(one, body)

    def _read(self, one: Instruction, index: int, body: Computation) -> float:
        """Bytes of operand `index` that the instruction reads."""
        source = body.get(one.operands[index])
        if source is None or one.operands[index] in one.operands[:index]:
            return 0.0
        whole = math.fsum(buffer.bytes for buffer in source.buffers)
        if whole == 0.0:
            return 0.0
        share = self._share(one, index)
        return whole if share is None else min(whole, share)

    def _share(self, one: Instruction, index: int) -> float | None:
        """Bytes of operand `index` that are touched; None for all of them."""
        if one.opcode in ("dynamic-slice", "slice", "gather") and index == 0:
            return math.fsum(buffer.size for buffer in one.buffers)
        if one.opcode == "dynamic-update-slice" and index == 0:
            return 0.0
        if one.opcode not in CALLING:
            return None
        fused = self.computations[one.attribute("calls")]
        parameter = next(p for p in fused.values() if p.opcode == "parameter" and p.rest.startswith(f"{index})"))
        return self._used(parameter.name, fused)

    def _used(self, name: str, fused: Computation) -> float | None:
        total = 0.0
        for user in fused.values():
            for index, operand in enumerate(user.operands):
                if operand == name:
                    part = self._used(user.name, fused) if user.opcode == "bitcast" else self._share(user, index)
                    if part is None or (user.opcode == "bitcast" and user.root):
                        return None
                    total += part
        return total

    def _written(self, one: Instruction, body: Computation) -> float:
        """Bytes of the result that go to HBM."""
        sizes, buffers = self._sizes(one, body), one.buffers
        if one.opcode == "async-start":  # its operands come first, semaphores last
            operands = sum(len(body[name].buffers) for name in one.operands if name in body)
            buffers = buffers[operands : operands + len(sizes)]
        return math.fsum(size for size, buffer in zip(sizes, buffers, strict=True) if buffer.hbm)

    def _sizes(self, one: Instruction, body: Computation) -> list[float]:
        """Bytes of every array of the result, wherever it lies; an update in place counts the update."""
        if one.opcode == "dynamic-update-slice":
            return [body[one.operands[1]].buffers[0].size]
        if one.opcode in CALLING:
            fused = self.computations[one.attribute("calls")]
            root = _through_bitcasts(next(inner for inner in fused.values() if inner.root), fused)
            if root.opcode != "tuple":
                return self._sizes(root, fused)
            outputs = [_through_bitcasts(fused[name], fused) for name in root.operands]
            return [self._sizes(output, fused)[0] for output in outputs]
        return [buffer.size for buffer in one.buffers]


def _through_bitcasts(one: Instruction, body: Computation) -> Instruction:
    while one.opcode == "bitcast":
        one = body[one.operands[0]]
    return one


def _called(one: Instruction) -> list[str]:
    """Computations of a `call` or `conditional`."""
    branches = re.findall(r"(?:to_apply|branch_computations|true_computation|false_computation)=([^=]*)", one.rest)
    return [name for branch in branches for name in re.findall(r"%([\w.-]+)", branch)]


def _product_flops(one: Instruction, body: Computation) -> float:
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
