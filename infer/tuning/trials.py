"""What tuning measures: cycles in compiled loops, watched text, and whole calls in turns with plain decoding."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core.loop import prefill, step
from eagle_jax.core.types import ROOT, Batch, Drafter, DraftTree, Engine, Params, RowRandomness, Sampling, Verified
from eagle_jax.runtime import generation
from eagle_jax.runtime.compilation import forget_programs
from eagle_jax.runtime.generation import request_of
from infer.common.timing import time_repetitions
from infer.cycle import Part
from infer.tuning.replay import DraftCosts, PassCosts, Replay, Score
from infer.tuning.shadow import watch

WATCHED = 8
"""Most replies that are watched at a time."""


class Sample(NamedTuple):
    """The prompts of a task. A prompt has its own key, so that its text does not depend on how they are batched.

    Attributes:
      prompts: token ids. keys: [R], one for each.
    """

    prompts: list[list[int]]
    keys: jax.Array

    def batches(self, size: int) -> list[Sample]:
        """In order, the last one possibly smaller."""
        return [
            Sample(self.prompts[at : at + size], self.keys[at : at + size]) for at in range(0, len(self.prompts), size)
        ]

    def of_length(self, least: int, most: int | None) -> Sample:
        """Prompts of more than `least` tokens, and not more than `most`."""
        kept = [at for at, prompt in enumerate(self.prompts) if least < len(prompt) <= (most or len(prompt))]
        return Sample([self.prompts[at] for at in kept], self.keys[jnp.array(kept, jnp.int32)])

    def first(self, count: int) -> Sample:
        """The first prompts alone."""
        return Sample(self.prompts[:count], self.keys[:count])


class Setting(NamedTuple):
    """What is tuned for.

    Attributes:
      prompt: tokens of the longest prompt; None is any.
    """

    batch: int
    temperature: float
    max_new_tokens: int
    prompt: int | None = None


class Costs(NamedTuple):
    """Seconds of cycles at one setting.

    Attributes:
      passes: by rows. drafts: what a method adds, by method. whole: of cycles that were measured as they are, by label.
    """

    passes: PassCosts
    drafts: dict[str, DraftCosts]
    whole: dict[str, float]


class Trial(NamedTuple):
    """Whole calls at one setting.

    Attributes:
      scores: by label. plain: tokens per second of plain decoding.
      identical, compared: texts that are plain decoding's, over all methods.
    """

    scores: dict[str, Score]
    plain: float
    identical: int
    compared: int

    def and_then(self, later: Trial) -> Trial:
        """With what was measured later: more repetitions of the same methods, or other methods."""
        scores = dict(self.scores)
        for label, score in later.scores.items():
            scores[label] = scores[label].and_then(score) if label in scores else score
        return Trial(scores, self.plain, self.identical + later.identical, self.compared + later.compared)


@functools.lru_cache(maxsize=64)
def blank(rows: int) -> Drafter:
    """A tree of so many rows, the root among them, that costs nothing to draft: the root's token below itself."""

    def init(params: Params, batch: int, slots: int) -> tuple[()]:
        return ()

    def update(params: Params, state: tuple[()], verified: Verified) -> tuple[()]:
        return state

    def draft(
        params: Params, state: tuple[()], root: jax.Array, chance: RowRandomness, sampling: Sampling
    ) -> tuple[DraftTree, tuple[()]]:
        tokens = jnp.broadcast_to(root[:, None], (root.shape[0], rows))
        parents = jnp.zeros_like(tokens).at[:, 0].set(ROOT)
        return DraftTree(tokens, parents, jnp.zeros(tokens.shape, jnp.float32)), state

    return Drafter(init, draft, update, taps=(), depth=min(rows - 1, 1), num_nodes=rows - 1)


def loop(
    target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter | None, sample: Sample, setting: Setting, turns: int
) -> Callable[[], Any]:
    """A call of so many cycles behind these prompts, in one compiled loop. A row that is done costs what others do.

    The state is that of an empty cache with the right lengths: no prefill is compiled, and a cycle's work does not
    depend on the numbers in it.
    """
    sampling = generation.make_sampling(setting.temperature)
    request = request_of(target, drafter, sample.prompts, setting.max_new_tokens, sampling, (), sample.keys)

    def empty(params: Params, batch: Batch) -> Any:
        return prefill(params, batch, sampling, request.engine, request.sizes)._replace(keys=jnp.zeros(()))

    shapes = jax.eval_shape(empty, request.params, request.batch)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    state = state._replace(cache=state.cache._replace(length=request.batch.lengths), keys=request.batch.keys)
    body = functools.partial(_cycle, sampling=sampling, engine=request.engine)
    return Part(body, request.params, state).repeat(turns)


def _cycle(params: Params, state: Any, sampling: Sampling, engine: Engine) -> Any:
    return step(params, state, sampling, engine)[0]


def designs(depths: Sequence[int], top_ks: Sequence[int], widths: Sequence[int]) -> list[TreeConfig]:
    """Trees from whose cycles the costs of drafting all others are interpolated: extremes, and a middle top_k."""
    found = []
    ks = sorted(set(top_ks))
    for top_k in sorted({ks[0], ks[len(ks) // 2], ks[-1]}):
        for depth in sorted({min(depths), max(depths)}):
            most = TreeConfig(depth, top_k, depth).pool_size
            fitting = [rows - 1 for rows in widths if depth <= rows - 1 <= most]
            found.append(TreeConfig(depth, top_k, min(fitting, default=depth) if top_k > 1 else depth))
    return found


def measure_costs(
    target: eagle_jax.Target,
    heads: Mapping[str, tuple[Any, Sequence[TreeConfig]]],
    fixed: Mapping[str, eagle_jax.BoundDrafter],
    sample: Sample,
    setting: Setting,
    widths: Sequence[int],
    turns: int,
    repeats: int,
) -> Costs:
    """Cycles of a few widths and trees in turns; the median of every one counts.

    Args:
      heads: by method, what fills trees, and the trees that are measured. fixed: by label, measured as they are.
      sample: the prompts of one batch.
    """
    forget_programs()
    calls: dict[Any, Callable[[], Any]] = {}
    for rows in widths:
        drafter = None if rows == 1 else eagle_jax.BoundDrafter.of(blank(rows), target, name=f"{rows} rows")
        calls["pass", rows] = loop(target, drafter, sample, setting, turns)
    for method, (head, shapes) in heads.items():
        for tree in shapes:
            calls[method, tree] = loop(target, head.with_tree(tree), sample, setting, turns)
    for label, drafter in fixed.items():
        calls["whole", label] = loop(target, drafter, sample, setting, turns)
    for index, call in enumerate(calls.values(), 1):
        note(f"compiling {index} of {len(calls)} loops")
        call()
    seconds = {name: statistics.median(times) / turns for name, times in time_repetitions(calls, repeats).items()}
    passes = PassCosts(tuple(widths), tuple(seconds["pass", rows] for rows in widths))
    drafts = {
        method: DraftCosts(tuple((t.depth, t.top_k, seconds[method, t] - passes.at(t.num_nodes + 1)) for t in shapes))
        for method, (_, shapes) in heads.items()
    }
    return Costs(passes, drafts, {label: seconds["whole", label] for label in fixed})


def record(target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter, sample: Sample, setting: Setting) -> Replay:
    """The trees that a drafter would have drafted at every position of the replies to these prompts."""
    options: dict[str, Any] = {"max_new_tokens": setting.max_new_tokens, "temperature": setting.temperature}
    parts = sample.batches(WATCHED)
    return Replay.joined([watch(target, drafter, part.prompts, key=part.keys, **options) for part in parts])


def prefill_seconds(
    target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter | None, samples: Mapping[str, Sample], setting: Setting
) -> dict[str, float]:
    """Seconds of the calls of a task up to and with every first token, with a drafter or plainly; the least of three.

    The first token of every reply is made its stop token: the compiled program is the one that is measured later.
    """
    found = {}
    for task, sample in samples.items():
        found[task] = 0.0
        for part in sample.batches(setting.batch):
            call = timed_call(target, drafter, part, setting)
            first = [[row[0]] for row in call().tokens]
            timed = {task: functools.partial(call, eos_ids=first)}
            timed[task]()
            found[task] += min(time_repetitions(timed, 3)[task])
    return found


def timed_call(
    target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter | None, part: Sample, setting: Setting, **options: Any
) -> Callable[..., eagle_jax.GenerateOutput]:
    """The product's own call for one batch."""
    return functools.partial(
        eagle_jax.generate,
        target,
        drafter,
        part.prompts,
        max_new_tokens=setting.max_new_tokens,
        temperature=setting.temperature,
        key=part.keys,
        **options,
    )


def cycles_of(target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter, sample: Sample, setting: Setting) -> list[int]:
    """Cycles of every reply, counted by generating them."""
    parts = sample.batches(setting.batch)
    return [int(count) for part in parts for count in timed_call(target, drafter, part, setting)().cycles]


def compete(
    target: eagle_jax.Target,
    methods: Mapping[str, eagle_jax.BoundDrafter | None],
    samples: Mapping[str, Sample],
    setting: Setting,
    repeats: int,
    **options: Any,
) -> Trial:
    """Every method against plain decoding, batch by batch and in turns, by the product's own `generate`.

    Args:
      methods: by label; a drafter, None, or "auto" with `options`.
    """
    ratios: dict[str, dict[str, tuple[float, ...]]] = {label: {} for label in methods}
    tokens, plain_seconds, identical, compared = 0, 0.0, 0, 0
    for task, sample in samples.items():
        sums: dict[str | None, list[float]] = {label: [0.0] * repeats for label in (None, *methods)}
        for number, part in enumerate(sample.batches(setting.batch), 1):
            note(f"{task}: batch {number}, {len(methods)} methods in turns with plain decoding")
            forget_programs()
            calls: dict[str | None, Callable[[], Any]] = {None: timed_call(target, None, part, setting)}
            for label, drafter in methods.items():
                more: dict[str, Any] = options if isinstance(drafter, str) else {}
                calls[label] = timed_call(target, drafter, part, setting, **more)
            answers = {label: call().tokens for label, call in calls.items()}
            for label in methods:
                identical += sum(a == b for a, b in zip(answers[label], answers[None], strict=True))
                compared += len(answers[None])
            for name, seconds in time_repetitions(calls, repeats).items():
                sums[name] = [total + one for total, one in zip(sums[name], seconds, strict=True)]
            tokens += sum(map(len, answers[None]))
        plain_seconds += statistics.median(sums[None])
        for label in methods:
            ratios[label][task] = tuple(a / b for a, b in zip(sums[None], sums[label], strict=True))
    return Trial({label: Score(per_task) for label, per_task in ratios.items()}, tokens / plain_seconds, identical,
                 compared)  # fmt: skip


EVERY = 30.0
"""Seconds between two notes in a log."""
_noted = [-EVERY]


def note(text: str) -> None:
    """Says how far it is: on a terminal in one row, in a log with a line every half minute."""
    if sys.stderr.isatty():
        print(f"{text:<100}", end="\r", file=sys.stderr, flush=True)
    elif (now := time.monotonic()) - _noted[0] >= EVERY:
        _noted[0] = now
        print(text.strip(), file=sys.stderr, flush=True)
