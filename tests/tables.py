"""Makes a target and drafters without a network: the last two tokens of the text give the logits.

The target finds those tokens by attention: its keys hold positions, its values hold tokens. For every new token it
checks that the committed tokens and the new ones in its mask are the positions 0 to its own, each once. Where they are
not (a commit one slot off, a sibling in the mask, a wrong position), its logits are NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.config import TreeConfig
from eagle_jax.core import (
    Batch,
    Drafter,
    Engine,
    GenerateState,
    KVCache,
    NewKV,
    Sizes,
    TargetFn,
    TargetOutput,
    Verified,
    emitted_log_probs,
    emitted_tokens,
    empty_cache,
    generate,
    noise,
)
from eagle_jax.core.randomness import row_keys
from eagle_jax.drafters import small_model_drafter
from tests import oracles


def random_table(vocab: int, seed: int = 0, sharpness: float = 2.0) -> np.ndarray:
    """[V + 1, V, V] logits by the last token but one (0: there is none, else 1 + id) and the last."""
    return np.random.default_rng(seed).normal(0, sharpness, (vocab + 1, vocab, vocab)).astype(np.float32)


def parameters(table: np.ndarray, likeness: float = 0.8, seed: int = 5) -> dict[str, Any]:
    """Parameters of the engine: the target's table, and one like it for the drafter."""
    known = np.where(np.isfinite(table), table, 0)
    draft = likeness * known + (1 - likeness) * random_table(table.shape[1], seed, float(known.std()))
    return {"target": {"table": jnp.asarray(table)}, "drafter": {"model": {"table": jnp.asarray(draft)}}}


def _forward(
    params: Any, tokens: jax.Array, positions: jax.Array, mask: jax.Array, cache: KVCache, taps: Any = (),
    earlier: NewKV | None = None,
) -> TargetOutput:  # fmt: skip
    own, at = (part.astype(jnp.float32)[:, None, :, None] for part in (tokens + 1, positions))
    drafted = () if earlier is None else (earlier,)
    seen_at = jnp.concatenate([cache.keys[0].swapaxes(2, 3), *(part.keys[0] for part in drafted), at], 2)[:, :, :, 0]
    seen = jnp.concatenate([cache.values[0], *(part.values[0] for part in drafted), own], 2)[:, :, :, 0]
    committed = jnp.arange(cache.slots)[None, None] < cache.length[:, None, None]
    visible = jnp.concatenate(
        [jnp.broadcast_to(part, (*tokens.shape, part.shape[-1])) for part in (committed, mask)], axis=2
    )
    place = positions[:, :, None].astype(jnp.float32)
    before = jnp.sum(jnp.where(visible & (seen_at == place - 1), seen, 0), axis=2)
    count, total = jnp.sum(visible, axis=2), jnp.sum(jnp.where(visible, seen_at, 0), axis=2)
    whole = (count == positions + 1) & (2 * total == positions * (positions + 1))
    hidden = jnp.stack([before, own[:, 0, :, 0], jnp.where(whole, 0.0, jnp.nan)], axis=2)
    own_features = jnp.stack([tokens, positions], axis=2).astype(jnp.float32)
    features = jnp.concatenate([own_features[..., :0], *(own_features + 1000 * tap for tap in taps)], axis=2)
    return TargetOutput(hidden, features, NewKV((at,), (own,)))


def _logits(params: Any, hidden: jax.Array) -> jax.Array:
    before, own = hidden[..., 0].astype(jnp.int32), hidden[..., 1].astype(jnp.int32) - 1
    return params["table"][before, own] + hidden[..., 2:]


TARGET = TargetFn(
    _forward, _logits, lambda params, tokens: tokens[..., None].astype(jnp.float32),
    lambda batch, slots: empty_cache(1, batch, 1, slots, 1, "float32"),
)  # fmt: skip


@functools.cache
def table_drafter(tree: TreeConfig, vocab: int, draft_vocab: int | None = None) -> Drafter:
    """Drafts trees from a table, and checks every run of confirmed tokens."""
    return watched(small_model_drafter(TARGET, tree, vocab, draft_vocab or vocab))


class Watch(NamedTuple):
    """State of a watched drafter: its own, the tokens confirmed so far, the root, and whether every run was right."""

    inner: Any
    length: jax.Array
    root: jax.Array
    sound: jax.Array


def watched(inner: Drafter) -> Drafter:
    """Wraps a drafter; `sound` becomes False in rows whose runs overlap, leave a gap or pair features wrongly."""

    def init(params: Any, batch: int, slots: int) -> Watch:
        zeros = jnp.zeros((batch,), jnp.int32)
        return Watch(inner.init(params, batch, slots), zeros, zeros, jnp.ones((batch,), bool))

    def draft(params: Any, state: Watch, root: jax.Array, randomness: Any, sampling: Any) -> tuple:
        tree, own = inner.draft(params, state.inner, root, randomness, sampling)
        return tree, state._replace(inner=own, sound=state.sound & (root == state.root))

    def update(params: Any, state: Watch, run: Verified) -> Watch:
        places = jnp.arange(run.tokens.shape[1])[None]
        pairs = jnp.stack([run.tokens, run.start[:, None] + places], axis=2) == run.features
        follows = (run.tokens == jnp.concatenate([run.tokens[:, :1], run.next_tokens[:, :-1]], axis=1))[:, :, None]
        right = jnp.all((pairs & follows).all(2) | (places >= run.count[:, None]), axis=1)
        joins = (run.start == state.length) & ((state.length == 0) | (run.tokens[:, 0] == state.root))
        any_ = run.count > 0
        last = jnp.take_along_axis(run.next_tokens, jnp.maximum(run.count - 1, 0)[:, None], axis=1)[:, 0]
        return Watch(
            inner.update(params, state.inner, run),
            state.length + run.count,
            jnp.where(any_, last, state.root),
            state.sound & (~any_ | (right & joins)),
        )

    return inner._replace(init=init, draft=draft, update=update, taps=(0,), with_limit=None)


def batch_of(
    prompts: Sequence[Sequence[int]], budget: Sequence[int], eos_ids: Sequence[Sequence[int]], chunk: int, seed: int = 7
) -> Batch:
    """Pads prompts to a multiple of the chunk, and stop tokens to the longest set."""
    width = -(-max(map(len, prompts)) // chunk) * chunk
    stops = max(1, *map(len, eos_ids))
    return Batch(
        jnp.asarray([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], jnp.int32),
        jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
        jnp.asarray(budget, jnp.int32),
        jnp.asarray([[*ids, *[-1] * (stops - len(ids))] for ids in eos_ids], jnp.int32),
        row_keys(jax.random.key(seed), jnp.arange(len(prompts))),
    )


generate_jit = jax.jit(generate, static_argnames=("engine", "sizes"))


def texts_of(state: GenerateState) -> list[list[int]]:
    """The emitted tokens of every row."""
    rows = np.asarray(emitted_tokens(state))
    return [row[:count].tolist() for row, count in zip(rows, state.num_tokens.tolist(), strict=True)]


def log_probs_of(state: GenerateState) -> list[np.ndarray]:
    """The log-probabilities of the emitted tokens of every row."""
    rows = np.asarray(emitted_log_probs(state))
    return [row[:count] for row, count in zip(rows, state.num_tokens.tolist(), strict=True)]


def run(
    params: dict[str, Any], batch: Batch, sampling: Any, drafter: Drafter, sizes: Sizes, **options: Any
) -> GenerateState:
    """Generates, and checks that drafter and cache hold the prompt and the emitted text."""
    state = generate_jit(params, batch, sampling, engine=Engine(TARGET, drafter, **options), sizes=sizes)
    check(state, batch)
    return state


def check(state: GenerateState, batch: Batch) -> None:
    """Checks drafter, cache and histogram of a state."""
    if isinstance(state.drafter, Watch):
        assert state.drafter.sound.all()
    for row, text in enumerate(texts_of(state)):
        known = [*batch.prompts[row, : batch.lengths[row]].tolist(), *text]
        length = int(state.cache.length[row])
        assert length == len(known) - bool(text), "the root is not committed, everything before it is"
        committed = np.asarray(state.cache.values[0])[row, 0, :length, 0] - 1
        assert committed.tolist() == known[:length]
        assert np.asarray(state.cache.keys[0])[row, 0, 0, :length].tolist() == list(range(length))
    assert state.accepted.sum(1).tolist() == state.cycles.tolist()


def slow_texts(table: np.ndarray, batch: Batch, max_tokens: int, **settings: float) -> list[list[int]]:
    """Tokens of plain decoding, one by one in NumPy, with the engine's noise."""
    return slow_run(table, batch, max_tokens, **settings)[0]


def slow_run(
    table: np.ndarray, batch: Batch, max_tokens: int, **settings: float
) -> tuple[list[list[int]], list[list[float]]]:
    """`slow_texts`, and their log-probabilities by the sampled law; at temperature 0 by the target's own."""
    vocab, texts, log_probs = table.shape[1], [], []
    drawn = jax.jit(jax.vmap(lambda key: jax.vmap(lambda i: noise(key, i, jnp.arange(vocab)))(jnp.arange(max_tokens))))
    randomness = np.asarray(drawn(batch.keys), np.float64)
    for row in range(len(batch.prompts)):
        text, values = batch.prompts[row, : batch.lengths[row]].tolist(), []
        while len(values) < min(int(batch.budget[row]), max_tokens):
            logits = table[text[-2] + 1 if len(text) > 1 else 0, text[-1]]
            if not np.isfinite(logits.max()):
                break
            if settings.get("temperature", 0):
                with np.errstate(divide="ignore"):
                    law = np.log(oracles.processed_law(logits, **settings))
                text.append(int(np.argmax(law + randomness[row, len(values)])))
            else:
                law = oracles.log_softmax(logits)
                text.append(int(logits.argmax()))
            values.append(law[text[-1]])
            if text[-1] in batch.eos_ids[row].tolist():
                break
        texts.append(text[int(batch.lengths[row]) :])
        log_probs.append(values)
    return texts, log_probs
