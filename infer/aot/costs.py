"""What a program costs before it ever runs: flops, memory traffic and transfers, from its jaxpr and optimised HLO.

The compiler's own cost analysis counts the body of a loop once and adds on-chip traffic to `bytes accessed`. Here loops
are multiplied by their turns, and memory traffic is read off the HLO: buffers that the layout places outside HBM
(`S(1)` is VMEM) cost nothing, a slice costs the slice, an update in place costs the update. Flops of the jaxpr are
those of all devices together and as they were written; flops of the HLO are those that one device executes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from infer.aot.hlo import Computation, Instruction, parse, product_flops, through_bitcasts

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


class Collective(NamedTuple):
    """Communication between devices.

    Attributes:
      kind: one of `COLLECTIVES`. bytes: of its result on one device, wherever it lies; of a reduce-scatter what is
        reduced. times: how often it is executed.
    """

    kind: str
    instruction: Instruction
    bytes: float
    times: int


class Program:
    """Optimised HLO, parsed as far as costs need it.

    Attributes:
      computations: instructions by name, by name of the computation. entry: where the program starts.
    """

    def __init__(self, text: str) -> None:
        self.computations, self.entry = parse(text)

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

        Names are asked first. Then the condition, where it is "counter < constant": the counters of `lax.scan` and of
        the compiler's own loops start at 0 and go up by 1.
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
                total += product_flops(one, body)
        return total

    def traffic(self, computation: str, lengths: Mapping[str, int]) -> float:
        """Bytes that one execution of `computation` reads from and writes to HBM, per device."""
        return math.fsum(move.bytes * move.times for move in self.moves(computation, lengths))

    def collectives(self, computation: str, lengths: Mapping[str, int]) -> list[Collective]:
        """Communication between devices.

        An all-reduce of which every device keeps its own part is a reduce-scatter, which is written as a fusion. What
        runs beside products is in all their fusions, and counted where it starts.
        """
        found = []
        for move in self.moves(computation, lengths):
            one = move.instruction
            inside = self.computations[one.attribute("calls")].values() if one.opcode in CALLING else (one,)
            starts = self._target(one) == "AsyncCollectiveStart"
            for part in inside:
                kind = part.opcode.removesuffix("-start")
                if kind in COLLECTIVES and (starts or not _chained(part)):
                    sizes = [buffer.size for buffer in part.buffers]
                    size = max(sizes) if part.opcode.endswith("-start") else math.fsum(sizes)
                    if kind == "all-reduce" and any(other.root and other.opcode == "dynamic-slice" for other in inside):
                        kind = "reduce-scatter"
                    found.append(Collective(kind, part, size, move.times))
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
        if self._target(one) == "AsyncCollectiveStart":
            return one.buffers[0].bytes + one.buffers[1].bytes
        if self._target(one) == "AsyncCollectiveDone":
            return 0.0
        if one.opcode == "slice-start":
            part = one.buffers[1]
            return part.bytes + (part.size if one.buffers[0].hbm else 0.0)
        read = math.fsum(self._read(one, index, body) for index in range(len(one.operands)))
        return read + self._written(one, body)

    def _target(self, one: Instruction) -> str:
        """What the root of a called computation calls in turn: the beginning and the end of chained collectives."""
        if one.opcode not in CALLING:
            return ""
        fused = self.computations[one.attribute("calls")].values()
        return next(inner.attribute("custom_call_target") for inner in fused if inner.root)

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
                if operand == name and user.opcode != "tuple" and not _chained(user):
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
            root = through_bitcasts(next(inner for inner in fused.values() if inner.root), fused)
            if root.opcode != "tuple":
                return self._sizes(root, fused)
            outputs = [through_bitcasts(fused[name], fused) for name in root.operands]
            passed = [output.opcode == "parameter" or _chained(output) for output in outputs]
            return [0.0 if same else self._sizes(it, fused)[0] for same, it in zip(passed, outputs, strict=True)]
        return [buffer.size for buffer in one.buffers]


def _chained(one: Instruction) -> bool:
    """Whether it is a collective that runs beside products: one of a chain of instructions that pass its buffers on."""
    return one.opcode in COLLECTIVES and "chain_id=" in one.rest


def _called(one: Instruction) -> list[str]:
    """Computations of a `call` or `conditional`."""
    branches = re.findall(r"(?:to_apply|branch_computations|true_computation|false_computation)=([^=]*)", one.rest)
    return [name for branch in branches for name in re.findall(r"%([\w.-]+)", branch)]
