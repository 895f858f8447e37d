"""A conversation whose caches are kept says what one says whose every prompt is read anew."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import eagle_jax
from eagle_jax.runtime import generation
from eagle_jax.runtime import session as sessions
from eagle_jax.runtime.session import Session
from tests.models import DRAFTERS, TREES, random_prompts, tiny_head, tiny_target

METHODS = [None, "eagle3-k3n12", "hydra++-static", "small-chain"]
METHODS += [
    pytest.param(name, marks=pytest.mark.slow) for name in ("eagle1-static", "lookup", "lookahead", "eagle3-block")
]


def said(chunks) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", METHODS)
def test_turns_are_those_of_prompts_read_anew(name, temperature):
    drafter = None if name is None else DRAFTERS[name](tiny_target())
    if name == "eagle3-block" and temperature:
        pytest.skip("drafts that are drawn: the text depends on what was drafted before (its law does not)")
    talk, text, drafted = Session(tiny_target(), drafter, context=200), [], 0
    for turn, length in enumerate((9, 40, 1, 17)):
        prompt = text + random_prompts([length], 12, seed=turn)[0]
        options = dict(max_new_tokens=20, temperature=temperature, key=jax.random.key(turn)[None], eos_ids=[3])
        chunks = list(talk.stream(prompt, **options))
        expected = eagle_jax.generate(tiny_target(), None, [prompt], **options).tokens[0]
        assert said(chunks) == expected
        assert talk.text == [*prompt, *expected]
        # Behind the first turn: the last token of the reply, which no cache has yet, and what the user says.
        assert talk.read == length + (turn > 0)
        text = talk.text
        drafted += sum(chunk.drafted for chunk in chunks)
    assert name is None or drafted, "nothing was ever accepted"


def test_log_probs_are_those_of_a_stream():
    talk, text = Session(tiny_target(), tiny_head("eagle3", TREES["k3n12"]), context=200), []
    for turn, law in enumerate(("target", "law", None)):
        text = text + random_prompts([9], 12, seed=turn)[0]
        options = dict(max_new_tokens=12, temperature=0.8, key=jax.random.key(turn)[None], log_probs=law)
        chunks = list(talk.stream(text, **options))
        expected = eagle_jax.generate(tiny_target(), None, [text], **options)
        assert said(chunks) == expected.tokens[0]
        if law is None:
            assert {chunk.log_probs for chunk in chunks} == {None}
        else:
            told = [value for chunk in chunks for value in chunk.log_probs]
            np.testing.assert_allclose(told, expected.log_probs[0], atol=1e-5)
        text = talk.text
    with pytest.raises(ValueError, match=r"log_probs must be .* got 'all'"):
        talk.stream(text, max_new_tokens=2, log_probs="all")


def test_a_long_turn_goes_through_in_chunks(monkeypatch):
    monkeypatch.setattr(sessions, "PREFILL_CHUNK", 32)
    talk = Session(tiny_target(), tiny_head("eagle3", TREES["k2n6"]), context=256)
    first = random_prompts([100], 12)[0]
    one = said(talk.stream(first, max_new_tokens=10))
    second = [*first, *one, *random_prompts([120], 12, seed=1)[0]]
    two = said(talk.stream(second, max_new_tokens=10))
    assert talk.read == 121
    assert one == eagle_jax.generate(tiny_target(), None, [first], max_new_tokens=10).tokens[0]
    assert two == eagle_jax.generate(tiny_target(), None, [second], max_new_tokens=10).tokens[0]


def test_a_context_may_be_used_to_its_end():
    """Caches are written behind the last token of the context: a path of the tree, a chunk."""
    talk = Session(tiny_target(), tiny_head("eagle3", TREES["chain4"]), context=64)
    first = random_prompts([30], 12)[0]
    one = said(talk.stream(first, max_new_tokens=3, eos_ids=()))
    second = [*first, *one, *random_prompts([20], 12, seed=1)[0]]
    two = said(talk.stream(second, max_new_tokens=64 - len(second), eos_ids=()))
    assert len(second) + len(two) == 64
    assert two == eagle_jax.generate(tiny_target(), None, [second], max_new_tokens=len(two), eos_ids=()).tokens[0]
    with pytest.raises(ValueError, match="must fit in the session's context of 64, got 64 \\+ 1"):
        talk.stream([*second, *two], max_new_tokens=1)


def test_a_prompt_that_is_no_continuation_is_read_anew():
    talk = Session(tiny_target(), tiny_head("eagle3", TREES["k2n6"]), context=128)
    first, other = random_prompts([20, 25], 12)
    said(talk.stream(first, max_new_tokens=8))
    other[0] = (first[0] + 1) % 12
    for prompt in (other, first):
        expected = eagle_jax.generate(tiny_target(), None, [prompt], max_new_tokens=8).tokens[0]
        assert said(talk.stream(prompt, max_new_tokens=8)) == expected
        assert talk.read == len(prompt)
    talk.reset()
    assert talk.text == [] and said(talk.stream(first, max_new_tokens=8)) == expected


def test_a_stop_token_may_be_replaced():
    """It is the last token of the reply, which is in no cache: a template may end the turn with another."""
    talk = Session(tiny_target(), tiny_head("eagle3", TREES["k2n6"]), context=128)
    first = random_prompts([20], 12)[0]
    reply = said(talk.stream(first, max_new_tokens=8, eos_ids=()))
    prompt = [*first, *reply[:-1], (reply[-1] + 1) % 12, 5, 6]
    expected = eagle_jax.generate(tiny_target(), None, [prompt], max_new_tokens=8).tokens[0]
    assert said(talk.stream(prompt, max_new_tokens=8)) == expected
    assert talk.read == 4  # and the token before, whose pair with the stop token the head has kept


@pytest.mark.parametrize("name", METHODS)
def test_a_prompt_that_differs_is_read_from_there(name):
    """As templates do that drop the thoughts of earlier turns. What is drafted then is what a new session drafts."""
    drafter = None if name is None else DRAFTERS[name](tiny_target())
    talk, fresh = Session(tiny_target(), drafter, context=128), Session(tiny_target(), drafter, context=128)
    first, more = random_prompts([20, 6], 12)
    options = dict(max_new_tokens=12, eos_ids=(), key=3)
    reply = said(talk.stream(first, **options))
    other = (reply[4] + 1) % 12
    for prompt, read in (
        ([*first, *reply[:4], other, *more], 8),  # the token before the difference is read again, for the head's sake
        ([*first, *reply[:4]], 1),
        (first[:7], 1),
        ([*first[:3], (first[3] + 1) % 12, *first[4:]], 18),
    ):
        chunks = list(talk.stream(prompt, **options))
        assert talk.read == read
        assert said(chunks) == eagle_jax.generate(tiny_target(), None, [prompt], **options).tokens[0]
        fresh.reset()
        if name != "lookahead":  # whose n-grams are those of earlier texts too
            anew = list(fresh.stream(prompt, **options))
            assert [(c.tokens, c.drafted) for c in chunks] == [(c.tokens, c.drafted) for c in anew]
            jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), known(talk), known(fresh))


def known(talk):
    """How far a drafter's caches reach, and the state that it goes on from."""
    state = talk._state.drafter
    cache = getattr(state, "cache", None)
    return [getattr(state, "hidden", None), getattr(state, "length", None), None if cache is None else cache.length]


def test_a_drafter_that_cannot_rewind_reads_anew():
    head = tiny_head("eagle3", TREES["k2n6"])
    own = eagle_jax.BoundDrafter.of(head.drafter._replace(rewind=None), tiny_target(), head.params)
    talk = Session(tiny_target(), own, context=128)
    first = random_prompts([20], 12)[0]
    said(talk.stream(first, max_new_tokens=8))
    prompt = [*first[:-1], (first[-1] + 1) % 12]
    expected = eagle_jax.generate(tiny_target(), None, [prompt], max_new_tokens=8).tokens[0]
    assert said(talk.stream(prompt, max_new_tokens=8)) == expected
    assert talk.read == 20


def test_a_reply_may_be_left_in_the_middle():
    talk = Session(tiny_target(), tiny_head("eagle3", TREES["k2n6"]), context=128)
    first = random_prompts([20], 12)[0]
    chunks = talk.stream(first, max_new_tokens=30, eos_ids=())
    begun = [*next(chunks).tokens, *next(chunks).tokens]
    chunks.close()
    assert talk.text == [*first, *begun]
    prompt = [*talk.text, 5, 6]
    expected = eagle_jax.generate(tiny_target(), None, [prompt], max_new_tokens=8).tokens[0]
    assert said(talk.stream(prompt, max_new_tokens=8)) == expected
    assert talk.read == 3


@pytest.mark.parametrize("name", METHODS[1:])
def test_replies_in_between_may_be_decoded_plainly(name):
    """The drafter's caches wait; wanted again, it reads what it has missed, and knows what a new session knows."""
    drafter = DRAFTERS[name](tiny_target())
    talk, fresh = Session(tiny_target(), drafter, context=200), Session(tiny_target(), drafter, context=200)
    parts, text = random_prompts([20, 6, 5, 7, 4], 12), []
    options = dict(max_new_tokens=8, eos_ids=(), key=3)
    for part, plain, read in zip(parts, (False, True, True, False, True), (20, 7, 6, 35, 5), strict=True):
        prompt = [*text, *part]
        chunks = list(talk.stream(prompt, plain=plain, **options))
        assert said(chunks) == eagle_jax.generate(tiny_target(), None, [prompt], **options).tokens[0]
        assert talk.read == read
        if plain:
            assert not any(chunk.drafted for chunk in chunks)
        elif name != "lookahead":  # whose n-grams are those of earlier texts too
            fresh.reset()
            anew = list(fresh.stream(prompt, **options))
            assert [(c.tokens, c.drafted) for c in chunks] == [(c.tokens, c.drafted) for c in anew]
            jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), known(talk), known(fresh))
        text = talk.text


def test_a_plain_reply_to_a_prompt_that_differs_takes_the_drafter_back_too():
    drafter = tiny_head("eagle3", TREES["k2n6"])
    cannot = eagle_jax.BoundDrafter.of(drafter.drafter._replace(rewind=None), tiny_target(), drafter.params)
    options = dict(max_new_tokens=8, eos_ids=())
    first, more = random_prompts([20, 6], 12)
    for own, kept in ((drafter, 8), (cannot, 0)):
        talk = Session(tiny_target(), own, context=128)
        said(talk.stream(first, **options))
        edited = [*first[:9], (first[9] + 1) % 12, *first[10:]]
        said(talk.stream(edited, plain=True, **options))
        assert talk.read == 12
        prompt = [*edited, *more, 5, 6, 7, 8]
        expected = eagle_jax.generate(tiny_target(), None, [prompt], **options).tokens[0]
        assert said(talk.stream(prompt, **options)) == expected
        assert talk.read == len(prompt) - kept


def test_plain_is_yes_or_no():
    with pytest.raises(ValueError, match="plain must be True or False, got 'no'"):
        Session(tiny_target(), None, context=64).stream([1, 2], max_new_tokens=4, plain="no")


def test_a_session_that_began_plainly_reads_all_for_the_drafter():
    talk = Session(tiny_target(), tiny_head("eagle3", TREES["k2n6"]), context=128)
    first = random_prompts([20], 12)[0]
    reply = said(talk.stream(first, plain=True, max_new_tokens=8, eos_ids=()))
    prompt = [*first, *reply, 5, 6]
    expected = eagle_jax.generate(tiny_target(), None, [prompt], max_new_tokens=8).tokens[0]
    assert said(talk.stream(prompt, max_new_tokens=8)) == expected
    assert talk.read == len(prompt)


def test_what_is_interrupted_inside_a_program_is_read_anew(monkeypatch):
    talk = Session(tiny_target(), tiny_head("eagle3", TREES["k2n6"]), context=128)
    first = random_prompts([20], 12)[0]

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(generation, "step_program", interrupted)
        with pytest.raises(KeyboardInterrupt):
            said(talk.stream(first, max_new_tokens=30, eos_ids=()))
    prompt = [*talk.text, 5, 6]
    expected = eagle_jax.generate(tiny_target(), None, [prompt], max_new_tokens=8).tokens[0]
    assert said(talk.stream(prompt, max_new_tokens=8)) == expected
    assert talk.read == len(prompt)


def test_two_replies_at_once_are_refused():
    talk = Session(tiny_target(), None, context=128)
    first = talk.stream(random_prompts([20], 12)[0], max_new_tokens=30, eos_ids=())
    next(first)
    said(talk.stream(random_prompts([9], 12)[0], max_new_tokens=4, eos_ids=()))
    with pytest.raises(ValueError, match="this reply has ended: the session has begun another prompt"):
        next(first)


def test_nothing_compiles_twice():
    talk = Session(tiny_target(), tiny_head("eagle3", TREES["k2n6"]), context=256)
    text, before = [], None
    for turn in range(4):
        prompt = [*text, *random_prompts([10 + turn], 12, seed=turn)[0]]
        said(talk.stream(prompt, max_new_tokens=12, temperature=0.5, key=turn, eos_ids=()))
        text = talk.text
        sizes = generation.extend_program._cache_size(), generation.step_program._cache_size()
        assert turn == 0 or sizes == before
        before = sizes


@pytest.mark.parametrize("context", [1, 0, True, 2.5, 10**6])
def test_a_context_that_cannot_be(context):
    with pytest.raises(ValueError, match="context must be an integer from 2 to the target's"):
        Session(tiny_target(), None, context=context)


def test_strangers_are_refused():
    with pytest.raises(ValueError, match="target must be a Target, got a str"):
        Session("gpt2")
    with pytest.raises(ValueError, match="got the string 'auto'"):
        Session(tiny_target(), "auto")
    assert np.isscalar(Session(tiny_target()).context)
