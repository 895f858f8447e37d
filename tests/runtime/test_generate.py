"""Temperature 0 and above: every drafter, tree and batch gives, token for token, the text of plain decoding."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.runtime import request
from tests.models import DRAFTERS, DRAWN, TREES, prepared, random_prompts, tiny_head, tiny_target

# Rows that stop at different times: by budget, by a stop token of their own, in the first token, never.
PROMPTS = random_prompts([5, 31, 1, 17, 8, 3], 12)
RUN = dict(max_new_tokens=[30, 7, 25, 1, 32, 12], eos_ids=[[3], [5], [], [1, 2], [0, 7, 9, 11, 10], [4]])


@pytest.fixture(scope="module")
def plain():
    """Text of plain decoding at temperatures 0 and 1."""
    target = tiny_target()
    return {
        temperature: eagle_jax.generate(target, None, PROMPTS, temperature=temperature, key=7, **RUN)
        for temperature in (0.0, 1.0)
    }


# What another method with the same tree, or another tree of the same method, has in common with these is run fast.
SLOW = {f"eagle1-{tree}" for tree in TREES if tree not in ("chain4", "static", "k10n59", "k3n12")}
SLOW |= {f"{kind}-{tree}" for kind in ("hydra", "hydra++") for tree in ("chain4", "traversal")}
SLOW |= {"hydra-static", "hydra++-k3n12", "lookahead-of-two", "eagle3-no-rerank", "eagle3-one"}
SLOW |= {"eagle1-block", "medusa-block", "hydra++-rejection", "small-top-p", "eagle1-tree-rejection"}
# Their rule at temperature 1 is that of another one here, which sees chance in the same way.
SLOW_SAMPLED = {"eagle1-chain4", "eagle1-k3n12", "small-static", "medusa-static", "medusa-chain4", "lookup-latest"}
SLOW_SAMPLED |= {f"eagle3-{tree}" for tree in TREES if tree not in ("law", "untempered", "top-p")}
SLOW_SAMPLED |= {"lookahead-default"}


def both(name):
    """A method at temperatures 0 and 1; sampled drafts have a test of their own above 0."""
    for temperature in (0.0,) if name in DRAWN else (0.0, 1.0):
        late = name in SLOW or (temperature > 0 and name in SLOW_SAMPLED)
        yield pytest.param(name, temperature, marks=pytest.mark.slow if late else ())


@pytest.mark.parametrize(("name", "temperature"), [case for name in DRAFTERS for case in both(name)])
def test_text_is_that_of_plain_decoding(name, temperature, plain):
    drafter = DRAFTERS[name](tiny_target())
    out = eagle_jax.generate(tiny_target(), drafter, PROMPTS, temperature=temperature, key=7, **RUN)
    assert out.tokens == plain[temperature].tokens
    assert out.accepted.shape == (len(PROMPTS), drafter.drafter.depth + 1)
    assert out.accepted.sum(1).tolist() == out.cycles.tolist()
    assert out.tau > plain[temperature].tau, "nothing was ever accepted: the test would not see a wrong acceptance"
    if drafter.drafter.depth > 1 and temperature == 0:
        assert out.accepted[:, 2:].sum() > 0, "no path beyond one node was ever accepted"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in sorted(DRAWN)])
def test_sampled_drafts_obey_stops_budgets_and_keys(name, plain):
    """Their text has the same law, not the same tokens; see test_law for the law."""
    drafter = DRAFTERS[name](tiny_target())
    out = eagle_jax.generate(tiny_target(), drafter, PROMPTS, temperature=1.0, key=7, **RUN)
    assert out.tau > 1
    for row, tokens in enumerate(out.tokens):
        stops, budget = RUN["eos_ids"][row], RUN["max_new_tokens"][row]
        assert 1 <= len(tokens) <= budget
        assert not set(tokens[:-1]) & set(stops)
        assert len(tokens) == budget or tokens[-1] in stops
    run = {option: values[:2] for option, values in RUN.items()}
    alone = eagle_jax.generate(tiny_target(), drafter, PROMPTS[:2], temperature=1.0, key=7, **run)
    assert alone.tokens == out.tokens[:2], "a row's text depends on the other rows"


# One of every kind of state: of a method that is not named here the last one. EAGLE-1 and Hydra have what EAGLE-3 and
# Hydra++ have, and wait for the slow tests.
CHOSEN = ["eagle3-k3n12", "small-dynamic", "medusa-static", "hydra++-static", "lookup", "lookahead"]
_last = {name.partition("-")[0]: name for name in [*DRAFTERS, *CHOSEN]}
EVERY = ["small-block", *_last.values()]
EVERY = [pytest.param(n, marks=pytest.mark.slow) if n.partition("-")[0] in ("eagle1", "hydra") else n for n in EVERY]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "lookup" else pytest.mark.slow) for n in CHOSEN])
def test_text_of_a_cut_law_is_that_of_plain_decoding(name):
    """Top-k, top-p and min-p at once, whatever drafts: of the token they left, not of the one that they took away."""
    law = dict(temperature=1.4, top_k=6, top_p=0.9, min_p=0.05, key=7)
    cut = eagle_jax.generate(tiny_target(), None, PROMPTS, **law, **RUN)
    assert cut.tokens != eagle_jax.generate(tiny_target(), None, PROMPTS, temperature=1.4, key=7, **RUN).tokens
    out = eagle_jax.generate(tiny_target(), DRAFTERS[name](tiny_target()), PROMPTS, **law, **RUN)
    assert out.tokens == cut.tokens
    assert out.tau > 1, "nothing was ever accepted"


FAST_SEEDS = range(5, 7)  # trees whose longer paths are accepted


def test_other_random_models_agree_too():
    accepted = sum(_agrees(seed) for seed in FAST_SEEDS)
    assert accepted[1] > 0
    assert accepted[2:].sum() > 0, "no path beyond one node was ever accepted"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(FAST_SEEDS.start), *range(FAST_SEEDS.stop, 40)])
def test_many_random_models_agree(seed):
    _agrees(seed)


def _agrees(seed):
    """A model, a head, a tree (K 1..10, N 1..128), prompts, budgets and stop tokens drawn from the seed.

    Returns how often 0 to 10 drafted tokens were accepted.
    """
    rng = np.random.default_rng(seed)
    vocab, layers, rows = int(rng.choice([5, 8, 16])), int(rng.integers(1, 4)), int(rng.integers(1, 5))
    kind = str(rng.choice(["eagle1", "eagle3"]))
    tree = _random_tree(rng, ("chain", "dynamic", "static", "dynamic")[seed % 4], vocab)
    target = tiny_target(vocab, layers, seed)
    params = tiny_head(kind, tree, vocab, vocab, layers, seed)
    head = eagle_jax.DraftHead.from_params(params.config, params.params, target, tree)
    prompts = random_prompts(rng.integers(1, 40, rows).tolist(), vocab, seed)
    run = dict(max_new_tokens=rng.integers(1, 32, rows).tolist(), eos_ids=rng.integers(0, vocab, (rows, 1)).tolist())
    plain_text = eagle_jax.generate(target, None, prompts, **run)
    out = eagle_jax.generate(target, head, prompts, **run)
    assert out.tokens == plain_text.tokens
    return np.pad(out.accepted.sum(0), (0, 10 - tree.depth))


def _random_tree(rng, kind, vocab):
    if kind == "chain":
        return TreeConfig.chain(int(rng.integers(1, 8)))
    if kind == "static":
        parents = [int(rng.integers(-1, node)) for node in range(int(rng.integers(2, 20)))]
        for node in range(len(parents)):  # no node may have more children than there are tokens
            while parents.count(parents[node]) > vocab:
                parents[node] = node - 1
        return TreeConfig.static(parents)
    top_k, depth = int(rng.integers(1, min(vocab, 10) + 1)), int(rng.integers(1, 7))
    most = min(top_k + (depth - 1) * top_k**2, 128)
    return TreeConfig(depth=depth, top_k=top_k, num_nodes=int(rng.integers(depth, max(most, depth) + 1)))


def test_plain_rows_stop_where_they_should(plain):
    for row, tokens in enumerate(plain[0.0].tokens):
        stops, budget = RUN["eos_ids"][row], RUN["max_new_tokens"][row]
        assert 1 <= len(tokens) <= budget
        assert not set(tokens[:-1]) & set(stops)
        assert len(tokens) == budget or tokens[-1] in stops
    assert len({len(tokens) for tokens in plain[0.0].tokens}) >= 3, "rows were meant to stop at different times"
    assert plain[0.0].cycles.tolist() == [len(tokens) - 1 for tokens in plain[0.0].tokens]


@pytest.mark.parametrize("name", EVERY)
def test_adding_a_row_changes_no_other_row(name, plain):
    head = DRAFTERS[name](tiny_target())
    for temperature in (0.0,) if name in DRAWN else (0.0, 1.0):
        for rows in (1, 3):
            run = {name: values[:rows] for name, values in RUN.items()}
            out = eagle_jax.generate(tiny_target(), head, PROMPTS[:rows], temperature=temperature, key=7, **run)
            assert out.tokens == plain[temperature].tokens[:rows]


@pytest.mark.parametrize("name", EVERY)
def test_stream_yields_the_tokens_of_generate(name, plain):
    head = DRAFTERS[name](tiny_target())
    for temperature in (0.0,) if name in DRAWN else (0.0, 1.0):
        run = dict(max_new_tokens=RUN["max_new_tokens"][0], eos_ids=RUN["eos_ids"][0], temperature=temperature, key=7)
        chunks = list(eagle_jax.stream(tiny_target(), head, PROMPTS[0], **run))
        assert [token for chunk in chunks for token in chunk.tokens] == plain[temperature].tokens[0]
        assert chunks[0].drafted == 0 and len(chunks[0].tokens) == 1
        assert all(0 <= chunk.drafted <= len(chunk.tokens) for chunk in chunks)


def test_two_streams_do_not_share_a_cache(plain):
    head = tiny_head("eagle3", TREES["k3n12"], draft_vocab=10)
    runs = [dict(max_new_tokens=RUN["max_new_tokens"][row], eos_ids=RUN["eos_ids"][row]) for row in (0, 2)]
    streams = [
        eagle_jax.stream(tiny_target(), head, PROMPTS[row], **run) for row, run in zip((0, 2), runs, strict=True)
    ]
    texts = [[], []]
    for chunks in itertools.zip_longest(*streams):
        for text, chunk in zip(texts, chunks, strict=True):
            text.extend(chunk.tokens if chunk else [])
    assert texts == [plain[0.0].tokens[0], plain[0.0].tokens[2]]


@pytest.mark.parametrize("name", EVERY)
def test_long_prompts_go_through_in_chunks(name, monkeypatch):
    """Chunked prefill gives the text of a one-piece prefill, for ragged rows that end in different chunks."""
    prompts = random_prompts([90, 33, 64, 7], 12)
    head = DRAFTERS[name](tiny_target())
    whole = eagle_jax.generate(tiny_target(), head, prompts, max_new_tokens=24)
    monkeypatch.setattr(request, "PREFILL_CHUNK", 32)
    chunked = eagle_jax.generate(tiny_target(), head, prompts, max_new_tokens=24)
    assert chunked.tokens == whole.tokens
    if not name.startswith("lookahead"):  # whose window begins with what the last chunk held
        assert chunked.accepted.tolist() == whole.accepted.tolist()


@pytest.mark.parametrize("switch", [jax.enable_x64(True), jax.numpy_dtype_promotion("strict")], ids=["x64", "strict"])
def test_the_users_settings_of_jax_change_no_text(switch):
    """Python integers are 64 bits wide under the one, and mixed dtypes an error under the other."""
    head = tiny_head("eagle3", TREES["k2n6"])
    options = {"max_new_tokens": 8, "temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "key": 2}
    wanted = eagle_jax.generate(tiny_target(), None, PROMPTS[:2], **options).tokens
    with switch:
        assert eagle_jax.generate(tiny_target(), head, PROMPTS[:2], **options).tokens == wanted


def test_pure_functions_compose_with_jit_vmap_and_eval_shape():
    from eagle_jax.core.loop import emitted_tokens, generate

    head = tiny_head("eagle3", TREES["k2n6"])
    request = prepared(head, PROMPTS[:2], temperature=1.0)

    def run(keys):
        state = generate(*request._replace(batch=request.batch._replace(keys=keys)))
        return emitted_tokens(state), state.num_tokens

    seeds = [11, 12, 13]
    keys = jnp.stack([jax.vmap(lambda r, s=s: jax.random.fold_in(jax.random.key(s), r))(jnp.arange(2)) for s in seeds])
    tokens, counts = jax.jit(jax.vmap(run))(keys)
    assert jax.eval_shape(run, keys[0])[0].shape == (2, request.sizes.max_tokens)
    for index, seed in enumerate(seeds):
        single = eagle_jax.generate(tiny_target(), None, PROMPTS[:2], max_new_tokens=16, temperature=1.0, key=seed)
        for row in range(2):
            assert np.asarray(tokens)[index, row, : counts[index, row]].tolist() == single.tokens[row]
            assert (np.asarray(tokens)[index, row, counts[index, row] :] == 0).all()


@pytest.mark.parametrize("name", EVERY)
def test_shard_map_over_the_batch_gives_the_same_text(name, plain):
    from jax.sharding import Mesh, PartitionSpec

    from eagle_jax.core.loop import emitted_tokens, generate

    head = DRAFTERS[name](tiny_target())
    prompts = PROMPTS[:4]
    request = prepared(head, prompts, max_new_tokens=20)

    def run(params, batch):
        state = generate(params, batch, request.sampling, request.engine, request.sizes)
        return emitted_tokens(state), state.num_tokens

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rows, everywhere = PartitionSpec("data"), PartitionSpec()
    sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(everywhere, rows), out_specs=rows, check_vma=False))
    tokens, counts = sharded(request.params, request.batch)
    expected = eagle_jax.generate(tiny_target(), None, prompts, max_new_tokens=20).tokens
    assert [np.asarray(tokens)[row, : counts[row]].tolist() for row in range(4)] == expected


def test_bfloat16_agrees_except_at_rounding_ties():
    """bfloat16 text is that of plain bfloat16 decoding up to the first tie of the two best logits within rounding."""
    target = tiny_target()
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target.params)
    low = eagle_jax.Target.from_params(target.config, half)
    head = tiny_head("eagle3", TREES["k2n6"])
    params = {
        "head": jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), head.params["head"]),
        "d2t": head.params["d2t"],
    }
    low_head = eagle_jax.DraftHead.from_params(head.config, params, low, head.tree)
    run = dict(max_new_tokens=24, eos_ids=())
    plain = eagle_jax.generate(low, None, PROMPTS, **run)
    fast = eagle_jax.generate(low, low_head, PROMPTS, **run)
    assert fast.tau > 1.05, "nothing was accepted: the comparison would be empty"
    equal = 0
    for prompt, tokens, expected in zip(PROMPTS, fast.tokens, plain.tokens, strict=True):
        agree = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), len(tokens))
        equal += agree == len(tokens)
        if agree < len(tokens):
            text = jnp.asarray([prompt + expected[:agree]])
            mask = jnp.tril(jnp.ones((text.shape[1],) * 2, bool))
            out = low.fn.forward(low.params, text, jnp.arange(text.shape[1])[None], mask, None)
            logits = np.asarray(low.fn.logits(low.params, out.hidden[0, -1]))
            best = np.sort(logits)[::-1]
            assert best[0] - best[1] < 4 * 2.0**-8 * np.abs(logits).max(), "more than four roundings of bfloat16 apart"
    assert equal >= len(PROMPTS) // 2, "ties are rare: most rows agree to the end"
    assert low.fn.logits(low.params, jnp.zeros((1, 16), jnp.bfloat16)).dtype == jnp.float32
