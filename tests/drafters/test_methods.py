"""Checks the drafts of every method against slow versions, and the errors of bad arguments."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle_jax
from eagle_jax.checkpoints import CheckpointError, check_same_tokens, save_target_checkpoint
from eagle_jax.config import ConfigError, TreeConfig
from eagle_jax.core.types import PADDING, ROOT, RowRandomness, Sampling
from eagle_jax.drafters import lookahead_drafter, prompt_lookup_drafter
from eagle_jax.drafters.pld import LookupState
from eagle_jax.models import MedusaHeads
from eagle_jax.runtime import generation
from eagle_jax.runtime.drafters import BoundDrafter, SmallModel
from eagle_jax.runtime.generation import request_of
from eagle_jax.runtime.target import Target
from tests import oracles
from tests.models import TREES, random_prompts, tiny_medusa, tiny_target


def looked_up(text, ngram, length, latest, shortest):
    """Prompt lookup with lists."""
    for width in range(ngram, shortest - 1, -1):
        places = [at for at in range(len(text) - width) if text[at : at + width] == text[-width:]]
        if places and len(text) > width:
            at = places[-1 if latest else 0] + width
            return text[at : at + length]
    return []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 4), st.booleans(), st.integers(1, 3))
def test_prompt_lookup_drafts_what_followed_before(text, ngram, latest, shortest):
    shortest = min(shortest, ngram)
    drafter = prompt_lookup_drafter(ngram, 6, latest, shortest)
    rest = np.random.default_rng(len(text)).integers(0, 3, 24 - len(text) + 1)  # garbage beyond the text
    state = LookupState(jnp.asarray([text[:-1] + rest.tolist()], jnp.int32), jnp.asarray([len(text) - 1]))
    keys = jax.random.split(jax.random.key(0), 1)
    chance = RowRandomness(keys, jnp.zeros((1,), jnp.int32))
    tree, _ = drafter.draft({}, state, jnp.asarray(text[-1:], jnp.int32), chance, Sampling())
    wanted = looked_up(text, ngram, 6, latest, shortest)
    assert np.asarray(tree.tokens)[0, 1 : len(wanted) + 1].tolist() == wanted
    assert np.asarray(tree.parents)[0].tolist() == [ROOT, *range(len(wanted)), *[PADDING] * (6 - len(wanted))]


@functools.partial(jax.jit, static_argnames="fn")
def passes(fn, params, texts):
    """[B, 64, H] states of padded texts, by a plain causal pass."""
    positions = jnp.broadcast_to(jnp.arange(64)[None], texts.shape)
    return fn.forward(params, texts, positions, jnp.tril(jnp.ones((64, 64), bool)), None).hidden


def states_of(target, texts):
    """The target's state after every text of token ids."""
    padded = np.zeros((len(texts), 64), np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    hidden = passes(target.fn, target.params, jnp.asarray(padded))
    return np.stack([hidden[row, len(text) - 1] for row, text in enumerate(texts)])


def prefilled(head, prompt):
    """State after a prompt, and the head's first tree: paths and their scores."""
    request = request_of(tiny_target(), head, [prompt], max_new_tokens=24, eos_ids=())
    state = generation.prefill_program(*request)
    chance = RowRandomness(state.keys, state.num_tokens)
    tree, _ = jax.jit(head.drafter.draft)(request.params, state.drafter, state.root, chance, request.sampling)
    tokens, parents, scores = (np.asarray(part[0]) for part in tree[:3])
    if head.tree.parents is not None:
        assert (parents[1:] - 1).tolist() == list(head.tree.parents)
    paths = oracles.paths_of(tokens, parents)
    assert len(set(paths)) == head.tree.num_nodes, "siblings carry equal tokens"
    return state, zip(paths, scores[1:], strict=True)


@pytest.mark.parametrize("size", [512, 5])
def test_lookahead_is_jacobi_iteration_with_a_pool_of_n_grams(size):
    """Window and pool, cycle by cycle, against lists: every cell is the target's choice after its column."""
    ngram, window, guesses = 4, 3, 2
    target, prompt = tiny_target(), random_prompts([9], 12, seed=5)[0]
    drafter = lookahead_drafter(ngram, window, guesses, size)
    head = BoundDrafter.bind(drafter, target)
    request = request_of(target, head, [prompt], max_new_tokens=24, eos_ids=())
    state = generation.prefill_program(*request)
    rows, text, pool = [prompt[:3], prompt[3:6], [prompt[6], prompt[7], prompt[0]]], prompt, []
    text = [*text, int(state.root[0])]
    assert np.asarray(state.drafter.window)[0].tolist() == rows
    hits = 0
    for _ in range(8):
        tree, _ = drafter.draft({}, state.drafter, state.root, RowRandomness(state.keys, state.num_tokens), Sampling())
        offered = [gram[1:] for gram in reversed(pool) if gram[0] == text[-1]][:guesses]
        rows[0] = [text[-1], *rows[0][1:]]
        assert np.asarray(tree.tokens)[0, : 3 * window].reshape(3, -1).tolist() == rows
        branches = np.asarray(tree.tokens)[0, 3 * window :].reshape(guesses, -1).tolist()
        assert branches[: len(offered)] == offered
        assert (np.asarray(tree.parents)[0, 3 * window + 3 * len(offered) :] == PADDING).all()
        hits += len(offered)
        columns = [[*text, *rows[0][1 : at + 1], *(row[at] for row in rows[1:])] for at in range(window)]
        fresh = np.argmax(target.fn.logits(target.params, jnp.asarray(states_of(target, columns))), axis=-1).tolist()
        for at in range(window):
            gram = [*(row[at] for row in rows), fresh[at]]
            pool = [other for other in pool if other != gram] + [gram]
        rows = [*rows[1:], fresh]
        state, info = generation.step_program(request.params, state, request.sampling, request.engine)
        text = text + np.asarray(info.tokens)[0, : int(info.emitted[0])].tolist()
        assert np.asarray(state.drafter.window)[0].tolist() == rows
        stamps = np.asarray(state.drafter.stamps)[0]
        kept = np.asarray(state.drafter.pool)[0][np.argsort(stamps)][(stamps == 0).sum() :].tolist()
        assert pool[-len(kept) :] == kept  # the latest
        assert min(len(pool), size - window) <= len(kept) <= size
        pool = kept
    assert hits > 1, "no n-gram was ever offered"


def test_a_draft_model_with_fewer_positions_than_its_target_warns():
    target, model = tiny_target(), tiny_target(layers=1, seed=3)
    short = eagle_jax.Target.from_params(dataclasses.replace(model.config, max_position=64), model.params, "short")
    with pytest.warns(UserWarning, match="draft model 'short' has 64 positions and the target .* beyond position 64"):
        SmallModel.from_model(target, short)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SmallModel.from_model(target, model)


SAMPLED = pytest.param(TreeConfig.chain(4, "rejection"), 0.7, marks=pytest.mark.slow)


@pytest.mark.parametrize(("tree", "temperature"), [(TreeConfig.chain(4), 0.0), SAMPLED])
def test_a_draft_model_that_is_the_target_is_always_right(tree, temperature):
    """Every draft is accepted only if cache, positions and masks are those of the text."""
    target = tiny_target()
    head = SmallModel.from_model(target, target, tree)
    run = dict(max_new_tokens=33, temperature=temperature, key=3, eos_ids=())
    out = eagle_jax.generate(target, head, random_prompts([1, 9, 20], 12), **run)
    assert out.accepted[:, :-1].sum() == 0


def test_a_draft_model_scores_its_tree_as_plain_passes_do():
    target, prompt = tiny_target(), random_prompts([9], 12, seed=5)[0]
    state, scored = prefilled(SmallModel.from_model(target, target, TREES["k3n12"]), prompt)
    for path, score in scored:
        texts = [[*prompt, int(state.root[0]), *path[:depth]] for depth in range(len(path))]
        law = oracles.log_softmax(target.fn.logits(target.params, jnp.asarray(states_of(target, texts))))
        assert score == pytest.approx(law[np.arange(len(path)), path].sum(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "rule"), [((12, 16), "deterministic"), ((16, 12), "rejection")])
def test_a_draft_model_may_pad_its_vocabulary(sizes, rule):
    """Embeddings of one family may differ in rows, such as 151,936 and 152,064."""
    target, model = (tiny_target(vocab=size, layers=1 if size == 16 else 2, seed=2) for size in sizes)
    prompts = random_prompts([4, 7], sizes[0])
    plain = eagle_jax.generate(target, None, prompts, max_new_tokens=16)
    drafter = SmallModel.from_model(target, model, TreeConfig.chain(3, rule))
    assert eagle_jax.generate(target, drafter, prompts, max_new_tokens=16).tokens == plain.tokens
    with pytest.raises(ConfigError, match="top_k must be at most 12, the common tokens, got 13"):
        SmallModel.from_model(target, model, TreeConfig(depth=1, top_k=13, num_nodes=13))


@pytest.mark.parametrize(("kind", "tree"), [("medusa", "static"), ("hydra", "k3n12"), ("hydra++", "static")])
def test_medusa_and_hydra_heads_read_what_they_should(kind, tree):
    """Head i reads the state before the root, the root's embedding and the embeddings of the path."""
    target, prompt = tiny_target(), random_prompts([9], 12, seed=5)[0]
    embedding, head = np.asarray(target.params["embed_tokens"]["embedding"]), tiny_medusa(kind, TREES[tree])
    state, scored = prefilled(head, prompt)
    run = functools.partial(MedusaHeads(head.config).apply, {"params": head.params["heads"]})
    read = states_of(target, [prompt])[0]
    if kind == "hydra++":
        states = jnp.asarray(states_of(target, [prompt[: end + 1] for end in range(len(prompt))]))[None]
        causal, positions = jnp.tril(jnp.ones((len(prompt),) * 2, bool)), jnp.arange(len(prompt))[None]
        read = np.asarray(run(states, positions, causal, method="prefix").states[0, -1])
    np.testing.assert_allclose(state.drafter.hidden[0], read, atol=1e-5)
    laws = {}

    def law(path):
        if path not in laws:
            before = [read, embedding[int(state.root[0])], *embedding[list(path)]]
            logits = run(jnp.concatenate(before[:1] if kind == "medusa" else before), len(path))
            laws[path] = oracles.log_softmax(logits)
        return laws[path]

    for path, score in scored:
        total = sum(law(path[:depth])[token] for depth, token in enumerate(path))
        assert score == pytest.approx(total, abs=1e-4)


def test_heads_of_another_model_raise():
    head = tiny_medusa("medusa", TREES["static"])
    with pytest.raises(ConfigError, match="heads: hidden_size must be the target's, 18, got 16"):
        head.rebind(Target.from_params(dataclasses.replace(tiny_target().config, hidden_size=18), tiny_target().params))
    with pytest.raises(ConfigError, match=r"TreeConfig\.depth must be at most 4 \(heads\), got 5"):
        tiny_medusa("medusa", TreeConfig.chain(5))


TOKENS = [f"t{number}" for number in range(12)]


def tokenizer(tokens):
    model = {"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)}, "merges": []}
    return {"tokenizer.json": json.dumps({"model": model, "added_tokens": []})}


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_a_draft_model_has_its_targets_tokenizer(tmp_path):
    for name, model in (("target", tiny_target()), ("draft", tiny_target(layers=1, seed=3))):
        save_target_checkpoint(model.config, model.params, write(tmp_path / name, tokenizer(TOKENS)), "float32")
    target, draft = eagle_jax.load_target(tmp_path / "target"), tmp_path / "draft"
    assert eagle_jax.load_draft_model(draft, target).config == tiny_target(layers=1, seed=3).config
    bare = eagle_jax.Target.from_params(target.config, target.params, "a/policy")  # has no files to compare with
    with pytest.warns(UserWarning, match="and target in memory have no tokenizer files of one kind to compare: assum"):
        eagle_jax.load_draft_model(draft, bare)
    with pytest.raises(CheckpointError, match="its target with 13 tokens, got 12 tokens"):
        eagle_jax.load_draft_model(draft, tiny_target(vocab=13))
    write(draft, tokenizer([*TOKENS[:7], "other", *TOKENS[8:]]))
    with pytest.raises(CheckpointError, match=r"must have the tokenizer of .*target, got 'other' for 't7' \(token 7\)"):
        eagle_jax.load_draft_model(draft, dataclasses.replace(target, name="gpt2"))  # whatever the target is called


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (tokenizer(TOKENS[:9]), tokenizer(TOKENS), "got 3 token ids, from 9, that only one has"),
        ({"tokenizer.json": "{"}, tokenizer(TOKENS), r"tokenizer\.json: cannot be read as JSON"),
        ({"tokenizer.model": "a"}, {"tokenizer.model": "b"}, r"target, got another tokenizer\.model\."),
    ],
)
def test_other_tokenizers_raise(ours, theirs, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        check_same_tokens(write(tmp_path / "draft", ours), write(tmp_path / "target", theirs), (12, 12))


def test_methods_raise_on_bad_numbers():
    target = tiny_target()
    for call, message in (
        (lambda: eagle_jax.prompt_lookup(target, ngram=0), "ngram must be an integer of at least 1, got 0"),
        (lambda: eagle_jax.prompt_lookup(target, ngram=2, shortest=3), "shortest must be at most ngram"),
        (lambda: eagle_jax.lookahead(target, ngram=1), "ngram must be an integer of at least 2, got 1"),
        (lambda: eagle_jax.lookahead(target, guesses=0), "guesses must be an integer of at least 1, got 0"),
        (lambda: eagle_jax.lookahead(target, guesses=9, pool=8), "pool must be at least 9, got 8"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
