"""Updates an EAGLE head on the target's own rollouts, with the hidden states that these have computed.

`generate` and `rollout` return the states (`taps`), so an update needs no pass of the target: it runs the head, and the
target's lm_head for the laws that the head learns. Everything else is `head_train_step`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from eagle_jax.config import DecoderConfig, HeadConfig, check_integer
from eagle_jax.packed import PackedTokens
from eagle_jax.training.objective import Objective, TargetOutputs
from eagle_jax.training.train_steps import Frozen, HeadTrainState, UpdateReport, head_train_step


class Rollouts(NamedTuple):
    """Texts of prompt and reply, one per row, and what the target computed along them.

    Attributes:
      texts: [J, T] each; the tokens of replies are supervised.
      target_outputs: features [J, T, F] of the head's taps and final-normed states [J, T, H]. The last token of a text,
        which the target did not read, and padding have zeros: no loss reads them.
    """

    texts: PackedTokens
    target_outputs: TargetOutputs


def rollout_taps(target: DecoderConfig, config: HeadConfig) -> tuple[int, ...]:
    """Returns the `taps` with which rollouts can train a head: the head's own, and the final-normed state."""
    return (*config.taps, target.num_layers)


def gather_replies(
    prompts: Int[Array, "J P"],
    lengths: Int[Array, " J"],
    tokens: Int[Array, "J M"],
    num_tokens: Int[Array, " J"],
    features: Float[Array, "J S F"],
    hidden_size: int,
) -> Rollouts:
    """Joins prompts and replies on the device; T is P + M.

    The arrays are those of `Batch` or `Jobs` (one row per reply) and of `GenerateState` or `Replies`.

    Args:
      features: with the taps of `rollout_taps`; the last `hidden_size` (H, the target's) are the final-normed states.

    Raises:
      ValueError: there are fewer features than tokens.
    """
    width = prompts.shape[1] + tokens.shape[1]
    if features.shape[1] < width:
        raise ValueError(
            f"features must have at least {width} positions (those of prompts and tokens), got {features.shape[1]}. "
            "Pass emitted_tokens(state), without the room behind the last token."
        )
    places = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (len(lengths), width))
    begin = lengths[:, None]
    ends = begin + num_tokens[:, None]
    of_prompt = jnp.pad(prompts, ((0, 0), (0, width - prompts.shape[1])))
    reply = jnp.take_along_axis(tokens, jnp.clip(places - begin, 0, tokens.shape[1] - 1), axis=1)
    is_text = places < ends
    text = jnp.where(is_text, jnp.where(places < begin, of_prompt, reply), 0)
    texts = PackedTokens(text, is_text & (places >= begin), is_text.astype(jnp.int32), jnp.where(is_text, places, 0))
    known = jnp.where((places < ends - 1)[..., None], features[:, :width], 0)  # the rest is undefined: NaN * 0 is NaN
    return Rollouts(texts, TargetOutputs(known[..., :-hidden_size], known[..., -hidden_size:]))


def pack_replies(
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    features: Sequence[np.ndarray] | None,
    hidden_size: int,
    length: int | None = None,
) -> Rollouts:
    """Joins prompts and replies on the host, such as `out.tokens` and `out.features` of `eagle_jax.rollout`.

    Args:
      prompts: one per reply, or one per as many replies as there are samples per prompt.
      features, hidden_size: as in `gather_replies`.
      length: T; None is the next power of two, so that few lengths share a program. Longer texts are cut.

    Raises:
      ValueError: the number of replies is no multiple of the number of prompts; `features` are missing, or are those of
        other texts; or `length` leaves no token of a reply.
    """
    check_integer("hidden_size", hidden_size)
    if length is not None:
        check_integer("length", length, 2)
    if features is None or len(features) != len(tokens):
        raise ValueError(
            f"features must have a row per reply ({len(tokens)}), got {'None' if features is None else len(features)}. "
            "Pass out.features of a rollout with taps=rollout_taps(target.config, head.config)."
        )
    if not len(prompts) or len(tokens) % len(prompts):
        raise ValueError(
            f"tokens must be a multiple of the {len(prompts)} prompts, got {len(tokens)} replies. Pass every prompt."
        )
    samples = len(tokens) // len(prompts)
    whole = [[*prompts[row // samples], *reply] for row, reply in enumerate(tokens)]
    for row, (joined, states) in enumerate(zip(whole, features, strict=True)):
        if len(tokens[row]) and len(states) != len(joined) - 1:
            raise ValueError(
                f"features must have a state for every token of prompt and reply but the last, {len(joined) - 1} in "
                f"row {row}, got {len(states)}. Pass the prompts in the order of the rollout."
            )
    longest = max(2, *map(len, whole))
    width = 1 << (longest - 1).bit_length() if length is None else length
    shape = (len(tokens), width)
    text, segments, positions = np.zeros((3, *shape), np.int32)
    supervised = np.zeros(shape, bool)
    known = np.zeros((*shape, features[0].shape[-1]), features[0].dtype)
    for row, (joined, states) in enumerate(zip(whole, features, strict=True)):
        count = min(len(joined), width) if len(tokens[row]) else 0  # a reply that was interrupted has no features
        text[row, :count] = joined[:count]
        segments[row, :count] = 1
        positions[row, :count] = np.arange(count)
        supervised[row, len(prompts[row // samples]) : count] = True
        known[row, : min(len(states), count)] = states[:count]
    if any(map(len, tokens)) and not supervised.any():
        raise ValueError(
            f"length must be more than the {min(map(len, prompts))} tokens of the shortest prompt, got {width}. Raise "
            "it: a longer text is cut."
        )
    texts = PackedTokens(*map(jnp.asarray, (text, supervised, segments, positions)))
    return Rollouts(
        texts, TargetOutputs(jnp.asarray(known[..., :-hidden_size]), jnp.asarray(known[..., -hidden_size:]))
    )


@functools.partial(jax.jit, static_argnames=("target", "config", "objective", "tx", "dtype", "mesh", "micro"))
def adapt(
    target: DecoderConfig,
    config: HeadConfig,
    objective: Objective,
    tx: optax.GradientTransformation,
    state: HeadTrainState,
    frozen: Frozen,
    rollouts: Rollouts,
    *,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    micro: int = 1,
) -> tuple[HeadTrainState, UpdateReport]:
    """Updates an EAGLE head once on rollouts. Jitted; inside another `jit`, a part of that program.

    Args:
      state: `HeadTrainState(head, tx.init(head), step, key)`, with `head` the drafter's `params["head"]` in float32.
      frozen: the target's parameters that computed the rollouts (their lm_head and embedding are read), and the
        drafter's `d2t`.
      rollouts: J texts. A mesh's groups of rows divide J / micro.
      dtype: of the head's products and activations.
      mesh: of the target and the head; None is one device.
      micro: parts of the texts, of equal size, that are computed one after another.

    Returns:
      the next state, and loss, gradient norm and metrics before the update.

    Raises:
      ValueError: `micro` does not divide J; or head, `d2t` or features are not those of `config`.
    """
    rows = rollouts.texts.tokens.shape[0]
    _check_parts(target, config, state, frozen, rollouts)
    if micro < 1 or rows % micro:
        raise ValueError(f"micro must divide the {rows} texts, got {micro}. Choose a divisor.")
    parts = jax.tree.map(lambda leaf: leaf.reshape(micro, rows // micro, *leaf.shape[1:]), rollouts)
    return head_train_step(target, config, objective, tx, dtype, state, frozen, parts.texts, mesh, parts.target_outputs)


def _check_parts(
    target: DecoderConfig, config: HeadConfig, state: HeadTrainState, frozen: Frozen, rollouts: Rollouts
) -> None:
    """Checks what belongs to the head, before a product of two shapes would fail."""
    if "fc" not in state.head:
        raise ValueError(f'state.head must be params["head"] of a drafter, got {sorted(state.head)}. Pass that.')
    width = len(config.taps) * target.hidden_size, target.hidden_size
    given = rollouts.target_outputs.features.shape[-1], rollouts.target_outputs.hidden.shape[-1]
    if given != width:
        raise ValueError(
            f"rollouts must have {width[0]} features and {width[1]} final states per token, got {given[0]} and "
            f"{given[1]}. Call rollout with taps=rollout_taps(target.config, head.config)."
        )
    reduced = config.draft_vocab_size < target.vocab_size
    if reduced and (frozen.d2t is None or len(frozen.d2t) != config.draft_vocab_size):
        raise ValueError(
            f"frozen.d2t must have the {config.draft_vocab_size} offsets of the draft vocabulary, got "
            f'{"none" if frozen.d2t is None else len(frozen.d2t)}. Pass head.params["d2t"].'
        )
