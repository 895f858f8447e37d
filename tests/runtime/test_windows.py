"""Checks sliding windows: text is that of plain decoding, and plain text that of passes over the whole text."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import RopeConfig, TreeConfig
from eagle_jax.core import RowRandomness
from eagle_jax.drafters.eagle import HeadFns
from eagle_jax.models import attention, init_params, layers
from eagle_jax.runtime import request
from eagle_jax.runtime.generation import prefill_program, request_of
from tests.models import DRAFTERS, TREES, random_prompts, tiny_head, tiny_target

PROMPTS = random_prompts([5, 31, 1, 17, 8, 3], 12)
RUN = dict(max_new_tokens=[30, 7, 25, 1, 32, 12], eos_ids=[[3], [5], [], [1, 2], [0, 7, 9, 11, 10], [4]])
WINDOWS = [(3, 0), *(pytest.param(some, marks=pytest.mark.slow) for some in ((0, 9), (5, 5), (1, 2))), (20, 33)]
"""Below and above the depth of the trees, and the chunk of a prompt; some layers or all. The texts wrap all rings."""
FAST = "eagle3-k3n12"
SLOW = ["eagle1-static", "medusa-static", "hydra++-static", "small-dynamic", "small-chain", "lookup", "lookahead",
        "eagle3-k10n59"]  # fmt: skip


@pytest.mark.parametrize("windows", WINDOWS)
def test_plain_text_is_that_of_passes_over_the_whole_text(windows):
    """The mask of these passes is made here, from positions."""
    target = tiny_target(windows=windows)
    out = eagle_jax.generate(target, None, PROMPTS[:3], max_new_tokens=20, eos_ids=()).tokens
    everything = eagle_jax.generate(tiny_target(), None, PROMPTS[:3], max_new_tokens=20, eos_ids=()).tokens
    assert out != everything or windows == WINDOWS[-1], "the windows hid nothing: the test would not see a wrong one"
    whole = np.zeros((3, 51), np.int32)
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, out, strict=False)):
        whole[row, : len(prompt) + 20] = prompt + tokens
    logits = np.asarray(jax.jit(lambda params, tokens: naive_logits(target, params, tokens))(target.params, whole))
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, out, strict=False)):
        assert logits[row, len(prompt) - 1 :][:20].argmax(-1).tolist() == tokens


def naive_logits(target, params, tokens):
    """Runs a layer at a time, each with a mask of its window."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    distance = positions[0][:, None] - positions[0][None]
    config, x = target.config, target.fn.embed(params, tokens)
    cos, sin = eagle_jax.models.rope.rope_angles(config.rope, config.head_dim, positions)
    for index, window in enumerate(config.windows):
        mask = (distance >= 0) & (distance < (window or tokens.shape[1]))
        layer = eagle_jax.models.decoder.DecoderLayer(config)
        x = layer.apply({"params": params[f"layers_{index}"]}, x, cos, sin, mask, None)[0]
    norm = layers.Norm(config.rms_norm_eps).apply({"params": params["norm"]}, x)
    return target.fn.logits(params, norm)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("name", [FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_text_is_that_of_plain_decoding(name, windows):
    target = tiny_target(windows=windows)
    drafter = DRAFTERS[name](target)
    plain = eagle_jax.generate(target, None, PROMPTS, **RUN)
    out = eagle_jax.generate(target, drafter, PROMPTS, **RUN)
    assert out.tokens == plain.tokens
    assert out.tau > plain.tau, "nothing was ever accepted: the test would not see a wrong acceptance"


GEMMA = dataclasses.replace(
    tiny_target().config, block="gemma3", windows=(4, 0), local_rope=RopeConfig(300.0), query_scalar=10, qk_norm=True,
    rope=RopeConfig(5000.0, "linear", factor=4.0), tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("name", [FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_text_of_gemma_is_that_of_plain_decoding(name):
    params = init_params(GEMMA, jax.random.key(3))
    target = eagle_jax.Target.from_params(
        GEMMA, jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim == 2 else leaf, params)
    )
    plain = eagle_jax.generate(target, None, PROMPTS, **RUN)
    out = eagle_jax.generate(target, DRAFTERS[name](target), PROMPTS, **RUN)
    assert out.tokens == plain.tokens
    assert out.tau > plain.tau


@pytest.mark.parametrize("window", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_head_with_a_window_drafts_by_the_last_tokens(window):
    """Its chain is that of a head without a window that reads only these: a key depends on one token."""
    target, tree = tiny_target(), TreeConfig.chain(5)
    without = tiny_head("eagle3", tree, draft_vocab=10, seed=9)
    layer = dataclasses.replace(without.config.layer, windows=(window,))
    config = dataclasses.replace(without.config, layer=layer)
    head = eagle_jax.DraftHead.from_params(config, without.params, target, tree)
    plain = eagle_jax.generate(target, None, PROMPTS, **RUN)
    assert eagle_jax.generate(target, head, PROMPTS, **RUN).tokens == plain.tokens
    assert head.drafter.rewind is None

    arguments = request_of(target, head, [PROMPTS[1]], max_new_tokens=8, eos_ids=(), key=0)
    state = prefill_program(*arguments)
    assert state.drafter.cache.slots == window
    randomness = RowRandomness(state.keys, state.num_tokens)
    draft = jax.jit(head.drafter.draft)
    found = draft(arguments.params, state.drafter, state.root, randomness, arguments.sampling)[0]

    tokens = jnp.asarray([PROMPTS[1]])
    length = tokens.shape[1]
    mask, positions = jnp.tril(jnp.ones((length, length), bool)), jnp.arange(length)[None]
    read = jax.jit(target.fn.forward, static_argnums=5)
    features = read(target.params, tokens, positions, mask, None, config.taps).features
    fns = HeadFns(without.config, target.fn)
    one_pass = jax.jit(fns.apply)
    states = list(jnp.moveaxis(fns.apply(arguments.params, features, method="fuse"), 1, 0))
    following, score = [*PROMPTS[1][1:], int(state.root[0])], 0.0
    for node in range(1, 6):
        embeds = target.fn.embed(target.params, jnp.asarray([following[-window:]]))
        at = jnp.arange(len(states) - window, len(states))[None]
        causal = jnp.tril(jnp.ones((window, window), bool))
        out = one_pass(arguments.params, embeds, jnp.stack(states[-window:], axis=1), at, causal)
        law = jax.nn.log_softmax(fns.logits(arguments.params, out.states[:, -1]))[0]
        score += float(law.max())
        following.append(int(fns.to_target(arguments.params, law.argmax())))
        states.append(out.states[:, -1])
        assert int(found.tokens[0, node]) == following[-1]
        np.testing.assert_allclose(found.scores[0, node], score, rtol=1e-4)


def test_streams_yield_the_tokens_of_generate():
    target = tiny_target(windows=(9, 5))
    head = DRAFTERS[FAST](target)
    wanted = eagle_jax.generate(target, None, PROMPTS[1:2], max_new_tokens=24, eos_ids=()).tokens[0]
    chunks = list(eagle_jax.stream(target, head, PROMPTS[1], max_new_tokens=24, eos_ids=()))
    assert [token for chunk in chunks for token in chunk.tokens] == wanted


def test_a_session_reads_the_text_anew_where_its_drafter_missed_a_wrapped_ring(monkeypatch):
    """After a plain reply the drafter lacks it, and the target's ring no longer holds what comes before."""
    monkeypatch.setattr(request, "bucket", lambda size: 192)  # prompts of all lengths share a program
    target = tiny_target(windows=(8, 0), seed=2, sharpness=9.0)
    session = eagle_jax.Session(
        target, tiny_head("eagle3", TREES["chain4"], 12, 10, seed=9).rebind(target), context=256
    )
    text = random_prompts([30], 12)[0]
    for plain in (False, True, False):
        expected = eagle_jax.generate(target, None, [text], max_new_tokens=24).tokens[0]
        reply = [token for chunk in session.stream(text, plain=plain, max_new_tokens=24) for token in chunk.tokens]
        assert reply == expected
        text = text + reply + [1, 5, 2]


@pytest.mark.parametrize("name", [None, FAST, pytest.param("small-chain", marks=pytest.mark.slow)])
def test_a_session_reads_an_edited_text_anew_once_it_is_longer_than_a_window(name, monkeypatch):
    monkeypatch.setattr(request, "bucket", lambda size: 64)  # prompts of all lengths share a program
    target = tiny_target(windows=(12, 0))
    talk = eagle_jax.Session(target, None if name is None else DRAFTERS[name](target), context=120)

    def check(prompt, read):
        chunks = talk.stream(prompt, max_new_tokens=4, eos_ids=())
        reply = [token for chunk in chunks for token in chunk.tokens]
        assert reply == eagle_jax.generate(target, None, [prompt], max_new_tokens=4, eos_ids=()).tokens[0]
        assert talk.read == read
        return prompt + reply

    text = check([3, 1, 4], 3)
    edited = text[:5] + [7]
    text = check(edited, 2 if name != "small-chain" else 6)  # the ring still holds all
    text = check(text + [2, 5, 8], 4)
    text = check(text + [1] * 10, 11)  # the ring wraps
    text = check(text + [3], 2)
    check(text[:20] + [9], 21)


@pytest.mark.slow
def test_text_on_a_mesh_is_that_of_one_device():
    target = tiny_target(windows=(9, 0))
    mesh = eagle_jax.parallel.make_mesh(2, 2)
    spread = eagle_jax.Target.from_params(target.config, target.params, mesh=mesh)
    head = tiny_head("eagle3", TREES["k2n6"], draft_vocab=10, seed=9)
    wanted = eagle_jax.generate(target, None, PROMPTS, **RUN).tokens
    assert eagle_jax.generate(spread, head.rebind(spread), PROMPTS, **RUN).tokens == wanted


def test_a_window_counts_the_depth_of_a_tree():
    """Of a tree with two branches, a token sees the last three of its own branch."""
    tree = np.zeros((6, 6), bool)
    for node, seen in enumerate([[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]]):
        tree[node, seen] = True
    found = np.asarray(attention.within_window(jnp.asarray(tree), 3))
    tree[5, 0] = False
    np.testing.assert_array_equal(found, tree)
    columns = np.concatenate([np.ones((6, 2), bool), tree], axis=1)  # two earlier tokens that all see
    found = np.asarray(attention.within_window(jnp.asarray(columns)[None], 2))[0]
    assert [np.flatnonzero(row).tolist() for row in found] == [[1, 2], [2, 3], [2, 4], [3, 5], [4, 6], [5, 7]]
