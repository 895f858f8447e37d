"""Checks that a session, which keeps its caches, gives the replies of `generate` for the whole text."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import eagle_jax
from eagle_jax.runtime import generation, request
from eagle_jax.runtime import session as sessions
from eagle_jax.runtime.session import Session
from tests.models import DRAFTERS, random_prompts, tiny_target

HEAD = "eagle3-k3n12"
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("hydra++-static", "lookup", "lookahead")]
METHODS = [HEAD, pytest.param("small-chain", marks=pytest.mark.slow), *SLOW]
OPTIONS = dict(max_new_tokens=8, eos_ids=(), key=3)


@pytest.fixture(autouse=True)
def one_bucket(monkeypatch):
    """Prompts of all lengths share a program."""
    monkeypatch.setattr(request, "bucket", lambda size: 256)


def begin(name: str | None = HEAD, **changes) -> Session:
    drafter = None if name is None else DRAFTERS[name](tiny_target())
    if changes:
        drafter = eagle_jax.BoundDrafter.bind(drafter.drafter._replace(**changes), tiny_target(), drafter.params)
    return Session(tiny_target(), drafter, context=200)


def tokens_of(chunks) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


def check(talk, prompt, read, **options):
    """Streams a reply, and checks its text and how many tokens were read for it."""
    chunks = list(talk.stream(prompt, **{**OPTIONS, **options}))
    options.pop("plain", None)
    assert tokens_of(chunks) == eagle_jax.generate(tiny_target(), None, [prompt], **OPTIONS | options).tokens[0]
    assert talk.read == read
    return chunks


def check_as_new(talk, fresh, prompt, chunks):
    """Checks that the drafter has the drafts and the state of a new session."""
    fresh.reset()
    again = list(fresh.stream(prompt, **OPTIONS))
    assert [(c.tokens, c.drafted) for c in chunks] == [(c.tokens, c.drafted) for c in again]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), known(talk), known(fresh))


def known(talk):
    """Returns the state that a drafter continues from, and the length of its caches."""
    state = talk._state.drafter
    cache = getattr(state, "cache", None)
    return [getattr(state, "hidden", None), getattr(state, "length", None), None if cache is None else cache.length]


@pytest.mark.parametrize("name", [pytest.param(None, marks=pytest.mark.slow), *METHODS])
def test_replies_equal_those_of_generate(name):
    talk, text, drafted = begin(name), [], 0
    for turn, length in enumerate((9, 30, 1, 17)):
        prompt = text + random_prompts([length], 12, seed=turn)[0]
        sampled = {"temperature": 0.8 if name == HEAD else 0.0, "key": jax.random.key(turn)[None]}
        # After the first turn: the last token of the reply, which is in no cache, and the user's text.
        chunks = check(talk, prompt, length + (turn > 0), max_new_tokens=20, eos_ids=[3], **sampled)
        assert talk.text == [*prompt, *tokens_of(chunks)]
        text = talk.text
        drafted += sum(chunk.drafted for chunk in chunks)
    assert name is None or drafted, "no draft was accepted"


@pytest.mark.slow
def test_log_probs_are_those_of_generate():
    talk, text = begin(), random_prompts([9], 12)[0]
    options = dict(max_new_tokens=12, temperature=0.8, key=jax.random.key(0)[None], log_probs="law")
    chunks = list(talk.stream(text, **options))
    expected = eagle_jax.generate(tiny_target(), None, [text], **options)
    assert tokens_of(chunks) == expected.tokens[0]
    found = [value for chunk in chunks for value in chunk.log_probs]
    np.testing.assert_allclose(found, expected.log_probs[0], atol=1e-5)


@pytest.mark.slow
def test_a_long_turn_is_read_in_chunks_up_to_the_end_of_the_context(monkeypatch):
    """A path of the tree or a chunk is written behind the last token of the context."""
    monkeypatch.setattr(sessions, "PREFILL_CHUNK", 32)
    talk, first = begin(), random_prompts([100], 12)[0]
    one = tokens_of(check(talk, first, 100))
    second = [*first, *one, *random_prompts([80], 12, seed=1)[0]]
    two = tokens_of(check(talk, second, 81, max_new_tokens=200 - len(second)))
    assert len(second) + len(two) == 200
    with pytest.raises(ValueError, match=r"must fit in the session's context of 200, got 200 \+ 1"):
        talk.stream([*second, *two], max_new_tokens=1)


@pytest.mark.parametrize("name", [HEAD, "small-chain", *SLOW])
def test_a_prompt_that_differs_is_read_from_there(name):
    """Some templates drop the thoughts of earlier turns, or end a turn with another token."""
    talk, fresh = begin(name), begin(name)
    first, more = random_prompts([20, 6], 12)
    reply = tokens_of(check(talk, first, 20))
    for prompt, read in (
        ([*first, *reply[:-1], (reply[-1] + 1) % 12, 5, 6], 4),  # the last token of the reply is in no cache
        ([*first, *reply[:4], (reply[4] + 1) % 12, *more], 8),  # the token before the difference is read again
        ([*first, *reply[:4]], 1),
        (first[:7], 1),
        ([*first[:3], (first[3] + 1) % 12, *first[4:]], 18),
        ([(first[0] + 1) % 12, *first[1:]], 20),
    ):
        chunks = check(talk, prompt, read)
        if name != "lookahead":  # whose n-grams are those of earlier texts too
            check_as_new(talk, fresh, prompt, chunks)
    talk.reset()
    assert talk.text == []
    check(talk, first, 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_drafter_reads_the_tokens_of_plain_replies_later(name):
    """After plain replies the drafter has the state of a new session."""
    talk, fresh, text = begin(name), begin(name), []
    check(talk, random_prompts([9], 12, seed=1)[0], 9, plain=True)  # a session may begin plainly: nothing is drafted
    parts = random_prompts([20, 6, 5, 7, 4], 12)
    for part, plain, read in zip(parts, (False, True, True, False, True), (20, 7, 6, 35, 5), strict=True):
        prompt = [*text, *part]
        chunks = check(talk, prompt, read, plain=plain)
        if plain:
            assert not any(chunk.drafted for chunk in chunks)
        elif name != "lookahead":
            check_as_new(talk, fresh, prompt, chunks)
        text = talk.text


@pytest.mark.parametrize(("changes", "kept"), [({}, 8), ({"rewind": None}, 0)])
def test_a_plain_reply_to_an_edited_prompt_rewinds_the_drafter(changes, kept):
    """A drafter that cannot rewind reads anew."""
    talk, (first, more) = begin(**changes), random_prompts([20, 6], 12)
    check(talk, first, 20)
    edited = [*first[:9], (first[9] + 1) % 12, *first[10:]]
    check(talk, edited, 12, plain=True)
    prompt = [*edited, *more, 5, 6, 7, 8]
    check(talk, prompt, len(prompt) - kept)
    if changes:
        check(talk, [*prompt[:-1], (prompt[-1] + 1) % 12], len(prompt))


def test_a_reply_may_be_closed_early():
    talk, first = begin(), random_prompts([20], 12)[0]
    chunks = talk.stream(first, max_new_tokens=30, eos_ids=())
    begun = [*next(chunks).tokens, *next(chunks).tokens]
    chunks.close()
    assert talk.text == [*first, *begun]
    check(talk, [*talk.text, 5, 6], 3)


def test_a_text_is_read_anew_after_an_interrupt_inside_a_program(monkeypatch):
    talk, first = begin(), random_prompts([20], 12)[0]

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(generation, "step_program", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokens_of(talk.stream(first, max_new_tokens=30, eos_ids=()))
    prompt = [*talk.text, 5, 6]
    check(talk, prompt, len(prompt))


def test_two_replies_at_once_raise_an_error():
    talk = begin(None)
    first = talk.stream(random_prompts([20], 12)[0], max_new_tokens=30, eos_ids=())
    next(first)
    tokens_of(talk.stream(random_prompts([9], 12)[0], max_new_tokens=4, eos_ids=()))
    with pytest.raises(ValueError, match="reply must be read to its end before the next prompt, got another"):
        next(first)


def test_later_turns_compile_no_program():
    talk, text, before = begin(), [], None
    first = generation.step_program._cache_size()
    for turn in range(4):
        prompt = [*text, *random_prompts([10 + turn], 12, seed=turn)[0]]
        tokens_of(talk.stream(prompt, max_new_tokens=12, eos_ids=()))
        text = talk.text
        sizes = generation.extend_program._cache_size(), generation.step_program._cache_size()
        assert turn == 0 or sizes == before
        before = sizes
    assert before[1] <= first + 1  # the first cycle's state has the types of all later ones


def test_invalid_arguments_raise_errors():
    target = tiny_target()
    for context in (1, True, 2.5, 10**6):
        with pytest.raises(ValueError, match="context must be an integer from 2 to the target's"):
            Session(target, context=context)
    for call, message in (
        (lambda: Session("gpt2"), "target must be a Target, got a str"),
        (lambda: Session(target, "auto"), "got 'auto'"),
        (lambda: Session(target).stream([1, 2], plain="no"), "plain must be True or False, got 'no'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
