"""Measures where the time of one cycle goes on this machine.

    python -m infer.cycle
    python -m infer.cycle --pair smollm2
    python -m infer.cycle --target PATH --eagle3 PATH --method eagle3@6x10x59
    python -m infer.cycle --temperature 1 --context 128,512
    python -m infer.cycle --model llama-3.1-8b --dtype bfloat16 --batch 8 --context 2048   # random weights

The parts are:

- the plain step and the whole cycle;
- drafting, the target's pass over the tree, the head's update and the commit;
- above temperature 0 a walk down accepted tokens, and a draw;
- cycles of smaller trees, without drafting (`--rows`);
- a plain step followed by drafting and update, from which the cost of a level follows;
- a cycle with the fewest drafted levels, of which no node is verified: what a draft costs beside its levels follows;
- a product that reads as many bytes as a step or a cycle must: weights and committed cache, the head once per level.

Every part runs alone in one compiled loop, with few and with many turns: the difference has no host time and no copy at
the start. The parts take turns, and the lower quartile of their times counts. They are compiled apart and need not add
up. The program prints a table and, last, one JSON object, also to a file (`--out`). Of it `break_even_tau` is the cost
of a whole cycle, and `cycle_cost` the costs of the parts: `core.CycleCost(**cycle_cost)`. `generate` takes either as
its `cycle_cost`. Of several lengths of the context, `cycle_cost` has all, and `generate` interpolates; the rest is of
the longest.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import eagle_jax
from eagle_jax.checkpoints import write_whole
from eagle_jax.config import EAGLE1_PARENTS
from eagle_jax.core.cache import commit, slots_read
from eagle_jax.core.loop import step
from eagle_jax.core.sampling import first_largest, make_sampling
from eagle_jax.core.tree import ancestor_mask, node_depths
from eagle_jax.core.types import Engine, GenerateState, Params, RowRandomness, Verified
from eagle_jax.models import eagle3_head, init_head_params, init_params
from eagle_jax.models.presets import model
from eagle_jax.runtime.compilation import machine, use_compilation_cache
from eagle_jax.runtime.generation import prefill_program, request_of
from infer.common.labels import Label
from infer.common.memory import least_bytes, reading
from infer.common.methods import Loader, Places, check_methods, load_pair, method_of
from infer.common.programs import at_least_one, can_write, listed, run
from infer.common.timing import FEW, Part, time_turns
from infer.tuning.costs import (
    RUNGS,
    blank,
    blank_states,
    drafting_of,
    empty_cycles_of,
    further_draw,
    least_levels,
    walks_of,
)
from infer.tuning.trials import Prompt, Setting, show_progress

DRAFTING = "plain step, draft and head update"
EMPTY = "cycle that drafts least and verifies none"
READING = "reading"
READ_ONCE = ", all it must read, once"
"""Names of parts."""
HEADS = ("hass", "eagle1", "eagle2", "eagle3")
"""Methods whose cycles have these parts."""


@dataclasses.dataclass(frozen=True)
class Args(Places):
    """Options of the program."""

    # an EAGLE head, as in infer.bench: hass, eagle2@static, eagle3@6x10x59, ...; None is the method of the given head,
    # else hass, with --pair smollm2 or --model eagle3
    method: str | None = None
    model: str | None = None  # sizes of a published model, as in infer.aot, with random weights; its head is eagle3
    context: str = "128"  # tokens in the cache; several numbers, separated by commas, are measured one after another
    batch: int = 1  # rows
    temperature: float = 0.0  # of the draws
    # rows of smaller trees, the root included, for cycle_cost; only those below the tree's count
    rows: str = ",".join(map(str, RUNGS))
    turns: int = 16  # cycles per measurement
    repeats: int = 9  # measurements, of which the lower quartile counts
    out: Path | None = None  # file for the last line, too


def main(args: Args) -> dict[str, Any]:
    """Measures and prints the parts; returns the last line."""
    at_least_one(args, "batch", "turns", "repeats")
    sizes, contexts = listed(args, "rows", int, 2), sorted(listed(args, "context", int, 1))
    make_sampling(args.temperature)  # raises before weights are read
    if args.out is not None:
        can_write(args.out, folder=False)
    use_compilation_cache()
    head: eagle_jax.BoundDrafter | None
    if args.model is not None:
        target, head = with_random_weights(args.model, args)
    else:
        method = method_of(args)
        check_methods([method], args)
        if Label.parse(method).method not in HEADS:
            raise ValueError(f"--method must be an EAGLE head, got {method}. Give {', '.join(HEADS)}.")
        target, _ = load_pair(args)
        head = Loader(target, args)(method)
    if not isinstance(head, eagle_jax.DraftHead):
        raise ValueError(f"--method must be an EAGLE head alone, got {args.method}. Leave its lookup out.")

    rows = head.tree.num_nodes + 1
    sizes = sorted({*(size for size in sizes if size < rows), rows})
    check_room(target, head, contexts[-1], args)
    names = f"{target.name} with {head.name}"
    costs, report = {}, {}
    for context in contexts:
        times, levels, slots = measure(target, head, sizes, context, args)
        even = times["cycle"] / times["plain step"]
        costs[slots] = cost_of(times, levels, least_levels(head.drafter), sizes) | {"slots": slots}
        print(f"One cycle of {names}: {rows} rows, {args.batch} x {context} tokens in the cache\n")
        print("| part | ms | of a plain step |\n|---|---:|---:|")
        for name, value in times.items():
            print(f"| {name} | {value:.3f} | {value / times['plain step']:.2f} |")
        left = ": in the others no node could enter the tree" if levels < head.tree.depth else ""
        print(f"\n{levels:g} of {head.tree.depth} levels were drafted{left}.")
        print(f"A cycle pays from a tau of {even:.2f}.\n")
        report = {"ms": times, "break_even_tau": round(even, 3)}
    print(f"Machine: {machine()}")
    longer: dict[str, Any] = {}
    for cost in reversed(costs.values()):
        longer = cost | ({"longer": longer} if longer else {})
    report |= {"cycle_cost": longer, "machine": machine(), "settings": dataclasses.asdict(args)}
    last = json.dumps(report, default=str)
    if args.out is not None:
        write_whole(args.out, last + "\n")
    print(last)
    return report


def measure(
    target: eagle_jax.Target, head: eagle_jax.DraftHead, sizes: Sequence[int], context: int, args: Args
) -> tuple[dict[str, float], float, float]:
    """Measures with `context` tokens in the cache.

    Returns:
      the milliseconds of every part, the levels that were drafted, and `CycleCost.slots`.
    """
    calls = {name: part.program() for name, part in parts(target, head, sizes, context, args).items()}
    prompts = [Prompt([0] * context, key) for key in jax.random.split(jax.random.key(0), args.batch)]
    setting = Setting(args.batch, args.temperature, longest_reply(head, args))
    calls |= walks_of(target, prompts, setting) if args.temperature else {}
    calls[DRAFTING] = drafting_of(target, head, prompts, setting, (0.0,))
    calls[EMPTY] = empty_cycles_of(target, head, prompts, setting, (0.0,))
    request, (state,) = blank_states(target, prompts, setting, head, (0.0,))

    def least(drafter: eagle_jax.BoundDrafter | None, levels: float | None = None) -> float:
        cache = state.cache.keys, state.cache.values
        return least_bytes(target.config, request.params, cache, drafter, args.batch, context, levels)

    part, read = reading(least(None))
    calls[READING] = part.program()
    found = {}
    for number, (name, call) in enumerate(calls.items(), 1):
        show_progress(f"compiling {number} of {len(calls)}, {name}")
        found[name] = call(FEW)
    show_progress(f"measuring, {args.repeats} repetitions")
    seconds = time_turns(calls, args.turns, "plain step", args.repeats)
    levels = float(found[DRAFTING].levels) / FEW
    per_byte = seconds.pop(READING) / read
    seconds |= {f"plain step{READ_ONCE}": per_byte * least(None), f"cycle{READ_ONCE}": per_byte * least(head, levels)}
    times = {name: round(1000 * value, 4) for name, value in seconds.items()}
    return times, levels, float(slots_read(state.cache))


def cost_of(times: dict[str, float], levels: float, least: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Returns the fields of a `CycleCost` from the milliseconds of the parts.

    Args:
      levels: that were drafted in `DRAFTING`. least: those of `EMPTY`. sizes: rows of measured passes.
    """
    step = times["plain step"]
    level = round(max(0.0, times[DRAFTING] - step) / levels / step, 4)
    return {
        "rows": [1, *sizes],
        "passes": [1.0, *(round(times[f"cycle of {size} rows"] / step, 3) for size in sizes)],
        "level": level,
        "token": round(further_draw(times) / step, 4),
        "draft": round(max(0.0, times[EMPTY] / step - 1 - level * least), 4),
    }


def with_random_weights(name: str, args: Args) -> tuple[eagle_jax.Target, eagle_jax.BoundDrafter]:
    """Returns a target and an EAGLE-3 head with the sizes of a published model.

    Raises:
      ValueError: the method is no EAGLE-3 head, or a target is given too. ConfigError: the model is unknown.
    """
    label = Label.parse(args.method or "eagle3")
    if label.method != "eagle3" or args.target is not None:
        raise ValueError("--model must come with --method eagle3 or eagle3@..., and without --target and --pair, got "
                         f"{args.method or args.target}. Give --model alone.")  # fmt: skip

    def fill(init: Callable[[Any, jax.Array], Params], config: Any) -> Params:
        shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
        draw = jax.jit(lambda shape: 0.02 * jax.random.normal(jax.random.key(0), shape, args.dtype), static_argnums=0)
        whole = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype)  # noqa: E731  # of token ids
        return jax.tree.map(lambda leaf: draw(leaf.shape) if leaf.dtype == jnp.float32 else whole(leaf), shapes)

    config = model(name)
    head = eagle3_head(config, min(32000, config.vocab_size))
    target = eagle_jax.Target.from_params(config, fill(init_params, config), name)
    params = fill(init_head_params, head)
    tree = label.tree(eagle_jax.TreeConfig(8), EAGLE1_PARENTS)
    return target, eagle_jax.DraftHead.from_params(head, params, target, tree, "a head of its size")


def longest_reply(head: eagle_jax.DraftHead, args: Args) -> int:
    """Returns the tokens after which a reply ends in no measurement."""
    return (FEW + args.turns) * (head.tree.depth + 1) + 1


def check_room(target: eagle_jax.Target, head: eagle_jax.DraftHead, context: int, args: Args) -> None:
    """Checks that the model has positions for the longest context and the measured turns."""
    longest = target.config.max_position - longest_reply(head, args)
    if context > longest:
        raise ValueError(f"--context must be at most {longest} for {args.turns} turns, got {context}. Lower it.")


def parts(
    target: eagle_jax.Target, head: eagle_jax.DraftHead, sizes: Sequence[int], context: int, args: Args
) -> dict[str, Part]:
    """Returns the parts of a cycle, in the state after a prompt of `context` random tokens.

    Args:
      sizes: rows of trees whose cycles are measured without drafting.
    """
    budget = longest_reply(head, args)
    prompts = jax.random.randint(jax.random.key(0), (args.batch, context), 0, target.config.vocab_size).tolist()
    sampling = make_sampling(args.temperature)

    def start(drafter: eagle_jax.BoundDrafter | None) -> tuple[Params, GenerateState, Engine]:
        request = request_of(
            target, drafter, prompts, max_new_tokens=budget, temperature=args.temperature, eos_ids=(), key=0
        )
        return request.params, prefill_program(*request), request.engine

    def cycle(engine: Engine) -> Callable[[Params, GenerateState], GenerateState]:
        return lambda params, state: step(params, state, sampling, engine)[0]

    plain_params, plain_state, plain_engine = start(None)
    params, state, engine = start(head)
    fn, drafter = engine.target, engine.drafter
    randomness = RowRandomness(state.keys, state.num_tokens)
    tree, _ = jax.jit(drafter.draft)(params, state.drafter, state.root, randomness, sampling)
    mask = ancestor_mask(tree.parents, drafter.depth)
    positions = state.cache.length[:, None] + node_depths(mask)

    def draft(params: Params, drafted: Any) -> Any:
        found, drafted = drafter.draft(params, drafted, state.root, randomness, sampling)
        # The next turn depends on this one's last node, by too little to change a token.
        return drafted._replace(hidden=drafted.hidden + 1e-30 * found.scores[:, -1:].astype(drafted.hidden.dtype))

    def verify(params: Params, tokens: jax.Array) -> jax.Array:
        out = fn.forward(params["target"], tokens, positions, mask, state.cache, drafter.taps)
        return first_largest(fn.logits(params["target"], out.hidden))

    out = jax.jit(lambda p: fn.forward(p, tree.tokens, positions, mask, state.cache, drafter.taps))(params["target"])
    width = drafter.depth + 1
    one = jnp.ones((args.batch,), jnp.int32)
    path = jnp.zeros((args.batch, width), jnp.int32)

    def extend(params: Params, drafted: Any) -> Any:
        tokens, features = tree.tokens[:, :1].repeat(width, 1), out.features[:, :1].repeat(width, 1)
        # The projections of the features depend on the turn before, by too little to change a number.
        features = features + 1e-30 * drafted.hidden[:, None, :1].astype(features.dtype)
        return drafter.update(params, drafted, Verified(tokens, tokens, features, drafted.cache.length, one))

    rows_params, rows_state, rows_engine = start(eagle_jax.BoundDrafter.bind(blank(2), target))
    undrafted = {
        f"cycle of {size} rows": Part(cycle(rows_engine._replace(drafter=blank(size))), rows_params, rows_state)
        for size in sizes
    }
    return {
        "plain step": Part(cycle(plain_engine), plain_params, plain_state),
        "cycle": Part(cycle(engine), params, state),
        "draft": Part(draft, params, state.drafter),
        "target pass": Part(verify, params, tree.tokens),
        "head update": Part(extend, params, state.drafter),
        "commit": Part(
            lambda _, cache: commit(cache, out.new, one, path, windows=target.fn.windows), params, state.cache
        ),
        **undrafted,
    }


if __name__ == "__main__":
    run(main, Args, __doc__)
