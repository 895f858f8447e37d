"""Computes traffic, communication and host transfers of a program from the text of its optimised HLO.

The compiler's own analysis counts the body of a loop once and adds on-chip traffic to `bytes accessed`. Here loops of
known length are multiplied by their turns. Buffers that the layout places outside HBM (`S(1)` is VMEM) cost nothing, a
slice costs the slice, an update in place costs the update. The attention kernel reads the blocks of the cache that hold
tokens, once per tile of queries, by the grid and block shapes of `eagle_jax.kernels`; of any other kernel the operands
and results count once. All numbers are those of one device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from eagle_jax.kernels import blocks_read, tile_of

FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id")
"""Instructions without memory traffic."""
FREE_CALLS = ("ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
KERNEL = "attend_cached"
"""Name of `eagle_jax.kernels.attend_cached` in HLO."""
KEYS, VALUES = 5, 6
CACHES = {KEYS: 3, VALUES: 2}
"""Its operands that are caches, and their axis of slots."""
CALLING = ("fusion", "async-start")
"""Instructions whose cost is that of the computation they call."""
LINE = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*?)\)(, \w+=.*)?$")
"""An instruction: root, name, result, opcode, operands, attributes."""


class Buffer(NamedTuple):
    """Holds an array of an instruction's result.

    Attributes:
      dims: shape.
      size: bytes, without the padding of its tiles.
      hbm: of them those in HBM, all or none.
    """

    dims: tuple[int, ...]
    size: float
    hbm: float


class Instruction(NamedTuple):
    """Holds a line of HLO. `inside` is the text of the operands, or the value of a constant or parameter."""

    name: str
    opcode: str
    buffers: tuple[Buffer, ...]
    inside: str
    operands: list[str]
    attributes: str
    root: bool

    def attribute(self, key: str) -> str:
        """Returns the value of `key=...`, without a percent sign; empty if there is none."""
        match = re.search(rf'{key}="?%?([^\s,}}"]+)', self.attributes)
        return match.group(1) if match else ""


Computation = dict[str, Instruction]


class Program:
    """Holds optimised HLO, parsed as far as costs need it.

    Args:
      text: as the compiler writes it out.
      context: committed tokens of every row, which the attention kernel reads; None is the whole cache.

    Attributes:
      computations: instructions by name, by name of the computation.
      entry: name of the computation where the program starts.
    """

    def __init__(self, text: str, context: int | None = None) -> None:
        self.context = context
        self.computations: dict[str, Computation] = {}
        self.entry, current = "", Computation()
        for line in text.splitlines():
            if line.endswith("{") and (start := re.match(r"(ENTRY )?%?([\w.-]+) \(", line)):
                current = self.computations[start.group(2)] = {}
                self.entry = start.group(2) if start.group(1) else self.entry
            elif match := LINE.match(re.sub(r"/\*.*?\*/", "", line)):
                root, name, result, opcode, inside, attributes = match.groups(default="")
                operands = re.findall(r"%([\w.-]+)", inside)
                current[name] = Instruction(name, opcode, _buffers(result), inside, operands, attributes, bool(root))

    def loop_body(self, op_name: str) -> str:
        """Returns the body of the `while` whose name ends with `op_name`.

        Raises:
          ValueError: there is not exactly one.
        """
        loops = [one for one in self._everywhere() if one.opcode == "while"]
        loops = [one for one in loops if one.attribute("op_name").endswith(op_name)]
        if len(loops) != 1:
            raise ValueError(f"HLO must have one loop named {op_name!r}, got {len(loops)}. Install an older JAX.")
        return loops[0].attribute("body")

    def moves(self, computation: str, times: int = 1) -> Iterator[tuple[Instruction, Computation, int]]:
        """Yields what `computation` runs: the instruction, the computation that holds it, and how often.

        Loops and calls are unrolled; of a conditional every branch counts.
        """
        body = self.computations[computation]
        for one in body.values():
            if one.opcode == "while":
                yield from self.moves(one.attribute("body"), times * self._turns(one))
            elif one.opcode in ("call", "conditional"):
                for names in re.findall(r"(?:to_apply|\w+_computations?)=([^=]*)", one.attributes):
                    for name in re.findall(r"%([\w.-]+)", names):
                        yield from self.moves(name, times)
            elif one.opcode not in FREE and not one.opcode.endswith(("-done", "-update")):
                yield one, body, times

    def _turns(self, loop: Instruction) -> int:
        """Returns how often a `while` runs whose condition is "counter < constant"; 1 for any other.

        The counters of `lax.scan` and of the compiler's own loops start at 0 and go up by 1.
        """
        condition = self.computations.get(loop.attribute("condition"), {})
        for one in condition.values():
            if one.root and one.opcode == "compare" and one.attribute("direction") == "LT":
                bound = condition.get(one.operands[1])
                if bound is not None and bound.opcode == "constant":
                    return int(bound.inside)
        return 1

    def traffic(self, computation: str) -> float:
        """Returns the bytes that one execution of `computation` reads from and writes to HBM."""
        return math.fsum(self._traffic(one, body) * times for one, body, times in self.moves(computation))

    def collectives(self, computation: str) -> dict[str, dict[str, float]]:
        """Returns the communication between devices by kind.

        An all-reduce of which every device keeps its own part is a reduce-scatter, which is written as a fusion.
        Collectives that overlap products appear in each of their fusions; they count once, where they start.

        Returns:
          executions ("times") and MB of the results on one device, in any memory, or of the input of a reduce-scatter:
          of all ("mb") and of one execution ("largest").
        """
        found: dict[str, dict[str, float]] = {}
        for one, _, times in self.moves(computation):
            inside = list(self.computations[one.attribute("calls")].values()) if one.opcode in CALLING else [one]
            starts = self._root_target(one) == "AsyncCollectiveStart"
            for part in inside:
                kind = part.opcode.removesuffix("-start")
                if kind not in COLLECTIVES or (_is_chained(part) and not starts):
                    continue
                sizes = [buffer.size / 1e6 for buffer in part.buffers]
                size = max(sizes) if part.opcode.endswith("-start") else math.fsum(sizes)
                if kind == "all-reduce" and any(other.root and other.opcode == "dynamic-slice" for other in inside):
                    kind = "reduce-scatter"
                total = found.setdefault(kind, {"times": 0, "mb": 0.0, "largest": 0.0})
                total["times"] += times
                total["mb"] += size * times
                total["largest"] = max(total["largest"], size)
        return found

    def host_transfers(self) -> list[str]:
        """Returns the names of instructions that exchange data with the host, or call it."""
        return [
            one.name for one in self._everywhere()
            if one.opcode.removesuffix("-done") in ("infeed", "outfeed", "send", "recv")
            or re.search("callback|host", one.attribute("custom_call_target").lower())
        ]  # fmt: skip

    def kernels(self) -> int:
        """Returns how often the program's text calls the attention kernel."""
        return sum(one.opcode == "custom-call" and one.name.startswith(KERNEL) for one in self._everywhere())

    def copies(self, computation: str, dims: tuple[int, ...]) -> list[str]:
        """Returns the instructions that write a whole array of these sizes to HBM, not a part in place.

        Write-backs of arrays kept in VMEM are not listed.
        """
        wanted, found = sorted(size for size in dims if size > 1), []
        for one, body, _ in self.moves(computation):
            starts = one.opcode == "copy-start"
            same = [
                buffer for buffer in (one.buffers[:1] if starts else one.buffers)
                if buffer.hbm and sorted(size for size in buffer.dims if size > 1) == wanted
            ]  # fmt: skip
            if same and not (starts and not one.buffers[1].hbm) and self._written(one, body) >= same[0].size:
                found.append(one.name)
        return found

    def _everywhere(self) -> Iterator[Instruction]:
        return (one for body in self.computations.values() for one in body.values())

    def _traffic(self, one: Instruction, body: Computation) -> float:
        target = self._root_target(one)
        if one.attribute("custom_call_target") in FREE_CALLS or target == "AsyncCollectiveDone":
            return 0.0
        if one.opcode == "copy-start" or target == "AsyncCollectiveStart":
            return one.buffers[0].hbm + one.buffers[1].hbm
        read = 0.0
        for index, name in enumerate(one.operands):
            if name in body and name not in one.operands[:index]:
                whole, share = math.fsum(buffer.hbm for buffer in body[name].buffers), self._share(one, index)
                if one.name.startswith(KERNEL) and index in CACHES:
                    read += whole * self._reads_of_cache(one, body, CACHES[index])
                    continue
                read += whole if share is None else min(whole, share)
        return read + self._written(one, body)

    def _reads_of_cache(self, one: Instruction, body: Computation, axis: int) -> float:
        """Returns how much of a cache the attention kernel reads, as a multiple of it; `axis` is that of the slots."""
        _, _, repeat, rows, _ = body[one.operands[1]].buffers[0].dims
        slots = body[one.operands[KEYS if axis == 3 else VALUES]].buffers[0].dims[axis]
        return blocks_read(slots, self.context) / slots * (rows // tile_of(rows, repeat))

    def _root_target(self, one: Instruction) -> str:
        """Returns the custom-call target of the root of a called computation; "" without one."""
        if one.opcode not in CALLING:
            return ""
        return _root(self.computations[one.attribute("calls")]).attribute("custom_call_target")

    def _share(self, one: Instruction, index: int) -> float | None:
        """Returns the bytes of operand `index` that are read; None for all of them."""
        if one.opcode in ("dynamic-slice", "slice", "gather") and index == 0:
            return math.fsum(buffer.size for buffer in one.buffers)
        if one.opcode == "dynamic-update-slice" and index == 0:
            return 0.0
        if one.opcode not in CALLING:
            return None
        fused = self.computations[one.attribute("calls")]
        parameter = next(p for p in fused.values() if p.opcode == "parameter" and p.inside == str(index))
        return self._used(parameter.name, fused)

    def _used(self, name: str, fused: Computation) -> float | None:
        total = 0.0
        for user in fused.values():
            for index, operand in enumerate(user.operands):
                if operand == name and user.opcode != "tuple" and not _is_chained(user):
                    view = user.opcode == "bitcast"
                    part = self._used(user.name, fused) if view else self._share(user, index)
                    if part is None or (view and user.root):
                        return None
                    total += part
        return total

    def _written(self, one: Instruction, body: Computation) -> float:
        """Returns the bytes of the result that go to HBM."""
        sizes, buffers = self._sizes(one, body), one.buffers
        if one.opcode == "async-start":  # its operands come first, semaphores last
            operands = sum(len(body[name].buffers) for name in one.operands if name in body)
            buffers = buffers[operands : operands + len(sizes)]
        return math.fsum(size for size, buffer in zip(sizes, buffers, strict=True) if buffer.hbm)

    def _sizes(self, one: Instruction, body: Computation) -> list[float]:
        """Returns the bytes of every array of the result, in any memory; of an update in place, the update's."""
        if one.opcode == "dynamic-update-slice":
            return [body[one.operands[1]].buffers[0].size]
        if one.opcode not in CALLING:
            return [buffer.size for buffer in one.buffers]
        fused = self.computations[one.attribute("calls")]
        root = _source(_root(fused), fused)
        if root.opcode != "tuple":
            return self._sizes(root, fused)
        outputs = [_source(fused[name], fused) for name in root.operands]
        passed = [output.opcode == "parameter" or _is_chained(output) for output in outputs]
        return [0.0 if same else self._sizes(it, fused)[0] for same, it in zip(passed, outputs, strict=True)]


def _buffers(text: str) -> tuple[Buffer, ...]:
    """Returns the arrays of a result, such as `(bf16[8,64]{1,0:T(8,128)S(1)}, u32[])`."""
    found = []
    for kind, dims, layout in re.findall(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?", text):
        sizes = tuple(int(size) for size in dims.split(",") if size)
        bits = re.search(r"\d+", kind)  # bf16, s4, f8e4m3fn; a pred has a byte, a token none
        size = math.prod(sizes) * (int(bits.group()) / 8 if bits else float(kind == "pred"))
        found.append(Buffer(sizes, size, 0.0 if "S(" in layout else size))
    return tuple(found)


def _root(body: Computation) -> Instruction:
    return next(one for one in body.values() if one.root)


def _source(one: Instruction, body: Computation) -> Instruction:
    """Returns the instruction of which `one` is a view."""
    while one.opcode == "bitcast":
        one = body[one.operands[0]]
    return one


def _is_chained(one: Instruction) -> bool:
    """Returns whether an instruction is a collective that overlaps products, in a chain of fusions."""
    return one.opcode in COLLECTIVES and "chain_id=" in one.attributes
