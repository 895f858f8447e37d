"""Checks updates of a head on rollouts: the update of `head_train_step`, without a pass of the target."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core import Batch, Engine, Sizes, emitted_tokens, generate, make_sampling, row_keys
from eagle_jax.parallel import make_mesh
from eagle_jax.training import (
    Frozen,
    HeadTrainState,
    Objective,
    adapt,
    gather_replies,
    head_train_step,
    pack_replies,
    rollout_taps,
)
from tests.models import random_prompts, tiny_head, tiny_target

PROMPTS = random_prompts([5, 9, 1, 7], 12)
OBJECTIVE = Objective(steps=3, chunk=16, remat=False)
TX = optax.adam(3e-3)
TREE = TreeConfig.chain(3)


def head_of(kind):
    return tiny_head(kind, TREE, draft_vocab=10)


@functools.cache
def rolled(kind, seed=3, temperature=1.0):
    head, target = head_of(kind), tiny_target()
    return eagle_jax.rollout(
        target, head, PROMPTS, lanes=3, samples_per_prompt=2, max_new_tokens=[20, 6, 23, 11], eos_ids=(2,),
        temperature=temperature, key=seed, taps=rollout_taps(target.config, head.config),
    )  # fmt: skip


def state_of(head, tx=TX):
    return HeadTrainState(head.params["head"], tx.init(head.params["head"]), jnp.int32(0), jax.random.key(0))


def frozen_of(head):
    return Frozen(head.target.params, head.params.get("d2t"))


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("eagle1", marks=pytest.mark.slow)])
def test_an_update_is_that_of_a_pass_over_the_texts(kind):
    """Only the right states, labels and masks give the gradient of a target that reads the whole texts."""
    head, target, out = head_of(kind), tiny_target(), rolled(kind)
    rollouts = pack_replies(PROMPTS, out.tokens, out.features, target.config.hidden_size)
    assert rollouts.texts.tokens.shape == (8, 32)
    state, frozen = state_of(head), frozen_of(head)
    needed = frozen._replace(target={name: target.params[name] for name in ("embed_tokens", "lm_head")})  # no layers
    found, report = adapt(target.config, head.config, OBJECTIVE, TX, state, needed, rollouts)
    parts = jax.tree.map(lambda leaf: leaf[None], rollouts.texts)
    wanted, expected = jax.jit(head_train_step, static_argnums=(0, 1, 2, 3, 4))(
        target.config, head.config, OBJECTIVE, TX, "float32", state, frozen, parts
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), report, expected)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), found.head, wanted.head)
    replies = [len(text) for text in out.tokens]
    prompts = [len(prompt) for prompt in PROMPTS for _ in range(2)]
    # Step k predicts token p + 2 + k, so a reply after a prompt of one token has one token less to predict at k = 0.
    counted = [
        sum(n - max(0, 2 + k - p) for n, p in zip(replies, prompts, strict=True) if n > 2 + k - p) for k in (0, 1, 2)
    ]
    assert report.metrics.counted.tolist() == counted
    assert int(found.step) == 1


@pytest.mark.parametrize(("micro", "mesh"), [(2, None), (1, (2, 2))])
def test_parts_and_meshes_change_no_update(micro, mesh):
    """The gradient is compared by plain descent: Adam's first update has its sign alone."""
    target, head, tx, out = tiny_target(), tiny_head("eagle3", TREE), optax.sgd(0.1), rolled("eagle3")
    rollouts = pack_replies(PROMPTS, out.tokens, out.features, 16, length=32)
    update = functools.partial(adapt, target.config, head.config, OBJECTIVE, tx)
    whole, alone = update(state_of(head, tx), frozen_of(head), rollouts)
    spread = head if mesh is None else eagle_jax.shard(target, head, make_mesh(*mesh))[1]
    parts, report = update(state_of(spread, tx), frozen_of(spread), rollouts, micro=micro, mesh=spread.target.mesh)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), parts.head, whole.head)
    np.testing.assert_allclose(report.loss, alone.loss, rtol=1e-5)
    assert mesh is None or parts.head["fc"]["weight"].sharding.mesh == spread.target.mesh
    with pytest.raises(ValueError, match="micro must divide the 8 texts, got 3"):
        update(state_of(head, tx), frozen_of(head), rollouts, micro=3)


@pytest.mark.slow
def test_updates_on_rollouts_raise_acceptance_without_new_programs():
    target, prompts = tiny_target(), random_prompts([6] * 16, 12, seed=5)
    head = tiny_head("eagle3", TREE)
    tx = optax.adam(1e-2)
    state, taus, texts = state_of(head, tx), [], []
    roll = functools.partial(
        eagle_jax.rollout, target, prompts=prompts, lanes=16, max_new_tokens=26, eos_ids=(), temperature=0.5, key=1,
        taps=rollout_taps(target.config, head.config),
    )  # fmt: skip
    before = adapt._cache_size()
    for _ in range(4):
        out = roll(drafter=head)
        taus.append(out.tau)
        texts.append(out.tokens)
        rollouts = pack_replies(prompts, out.tokens, out.features, 16)
        for _ in range(25):
            state, _ = adapt(target.config, head.config, OBJECTIVE, tx, state, frozen_of(head), rollouts)
        new = eagle_jax.DraftHead.from_params(head.config, head.params | {"head": state.head}, target, TREE)
        assert new.drafter is head.drafter
        head = new
    taus.append(roll(drafter=head).tau)
    assert all(text == texts[0] for text in texts), "the head changed the policy's text"
    assert taus[-1] > taus[0] + 0.5
    assert adapt._cache_size() == before + 1


def test_a_policy_step_and_a_head_step_are_one_program():
    """Rollout, a step of the policy along its reward's gradient (REINFORCE) and a step of the head, in one `jit`."""
    head, target = tiny_head("eagle3", TREE), tiny_target()
    taps, width, most = rollout_taps(target.config, head.config), 8, 8
    engine, sizes = Engine(target.fn, head.drafter, taps=taps), Sizes(max_tokens=most, chunk=width)
    tx, sgd = optax.adam(1e-2), optax.sgd(0.1)

    def policy_loss(policy, texts):
        positions = jnp.broadcast_to(jnp.arange(width + most)[None], texts.tokens.shape)
        mask = jnp.tril(jnp.ones((width + most,) * 2, bool))
        logits = target.fn.logits(policy, target.fn.forward(policy, texts.tokens, positions, mask, None, ()).hidden)
        labels = texts.tokens[:, 1:]
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), labels[..., None], -1)[..., 0]
        reward = jnp.where(labels == 7, 1.0, -0.1)  # the policy shall write token 7
        return -jnp.mean(jnp.sum(jnp.where(texts.supervised[:, 1:], log_probs * reward, 0.0), axis=1))

    @jax.jit
    def train(policy, state, batch):
        params = {"target": policy, "drafter": head.params | {"head": state.head}}
        done = generate(params, batch, make_sampling(1.0), engine, sizes)
        rollouts = gather_replies(
            batch.prompts, batch.lengths, emitted_tokens(done), done.num_tokens, done.features, 16
        )
        gradient = jax.grad(policy_loss)(policy, rollouts.texts)
        new = optax.apply_updates(policy, sgd.update(gradient, sgd.init(policy))[0])
        # The head learns the policy that wrote the texts: its states are those of `features`.
        state, report = adapt(
            target.config, head.config, OBJECTIVE, tx, state, Frozen(policy, head.params["d2t"]), rollouts
        )
        return new, state, report, rollouts, done.num_tokens

    full = functools.partial(jnp.full, (16,))
    prompts = jnp.asarray(random_prompts([width] * 16, 12))
    policy, state, losses, sevens = target.params, state_of(head, tx), [], []
    for turn in range(6):
        keys = row_keys(jax.random.key(turn), jnp.arange(16))
        batch = Batch(prompts, full(width), full(most), full(-1)[:, None], keys)
        policy, state, report, rollouts, counts = train(policy, state, batch)
        losses.append(float(report.loss))
        sevens.append(float(((rollouts.texts.tokens == 7) & rollouts.texts.supervised).sum()))
    assert train._cache_size() == 1
    assert counts.tolist() == [most] * 16
    assert losses[-1] < losses[0] and sevens[-1] > sevens[0]
    assert int(state.step) == 6


def test_replies_joined_on_the_device_are_those_of_the_host():
    out, prompts = rolled("eagle3"), [prompt for prompt in PROMPTS for _ in range(2)]
    host = pack_replies(PROMPTS, out.tokens, out.features, 16, length=9 + 23)
    padded = np.zeros((8, 9), np.int32)
    tokens, features = np.full((8, 23), 5, np.int32), np.full((8, 40, out.features[0].shape[1]), np.nan, np.float32)
    for row, (prompt, text, states) in enumerate(zip(prompts, out.tokens, out.features, strict=True)):
        padded[row, : len(prompt)], tokens[row, : len(text)] = prompt, text
        features[row, : len(states)] = states
    lengths, counts = (jnp.asarray([len(row) for row in rows]) for rows in (prompts, out.tokens))
    arrays = jnp.asarray(padded), lengths, jnp.asarray(tokens), counts, jnp.asarray(features)
    jax.tree.map(np.testing.assert_array_equal, gather_replies(*arrays, 16), host)
    with pytest.raises(ValueError, match=r"features must have at least 32 positions .*, got 31"):
        gather_replies(*arrays[:4], arrays[4][:, :31], 16)


def test_long_and_interrupted_replies_are_packed():
    features = [np.ones((5, 6), np.float32), np.zeros((0, 6), np.float32)]
    found = pack_replies([[1, 2, 3], [4, 5]], [[7, 8, 9], []], features, 2, length=4)
    assert found.texts.tokens.tolist() == [[1, 2, 3, 7], [0] * 4]
    assert found.texts.supervised.tolist() == [[False, False, False, True], [False] * 4]
    assert found.texts.segments.tolist() == [[1] * 4, [0] * 4]
    assert found.target_outputs.features.shape == (2, 4, 4) and found.target_outputs.hidden.shape == (2, 4, 2)
    with pytest.raises(ValueError, match=r"features must have a row per reply \(2\), got None"):
        pack_replies([[1]], [[2], [3]], None, 2)
    with pytest.raises(ValueError, match="tokens must be a multiple of the 2 prompts, got 1 replies"):
        pack_replies([[1], [2]], [[3]], features[:1], 2)
    with pytest.raises(ValueError, match=r"length must be more than the \d+ tokens of the shortest prompt, got 3"):
        pack_replies([[1, 2, 3]], [[7, 8, 9]], features[:1], 2, length=3)
    with pytest.raises(ValueError, match=r"features must have a state for every token .*, 5 in row 1, got 4"):
        pack_replies([[1], [2, 3, 4]], [[7, 8, 9, 5, 6], [7, 8, 9]], [features[0], features[0][:4]], 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("head", r"""state\.head must be params\["head"\] of a drafter, got \['d2t', 'head'\]"""),
        (
            "taps",
            r"rollouts must have 48 features and 16 final states per token, got 32 and 16\. Call rollout with taps",
        ),
        ("d2t", r"frozen\.d2t must have the 10 offsets of the draft vocabulary, got none"),
    ],
)
def test_parts_of_another_head_are_errors(change, message):
    head, out = head_of("eagle3"), rolled("eagle3")
    state, frozen = state_of(head), frozen_of(head)
    features = [row[:, 16:] for row in out.features] if change == "taps" else out.features
    rollouts = pack_replies(PROMPTS, out.tokens, features, 16)
    if change == "head":
        state = state._replace(head=head.params)
    elif change == "d2t":
        frozen = Frozen(head.target.params)
    with pytest.raises(ValueError, match=message):
        adapt(head.target.config, head.config, OBJECTIVE, TX, state, frozen, rollouts)
