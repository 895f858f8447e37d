"""Checks that a row ends before a token without finite logits, and that other rows keep their text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.data.chat.dialogues import Dialogue
from eagle_jax.data.rows import parse_row
from eagle_jax.runtime import session as sessions
from eagle_jax.runtime.target import Target
from tests.models import DRAFTERS, random_prompts, tiny_target
from train import regenerate

VOCAB = 20
PROMPTS = random_prompts([4, 7], VOCAB, seed=5)


def with_nan(token, value=np.nan):
    """`tiny_target` with a value in the embedding of `token`."""
    target = tiny_target(VOCAB)
    table = target.params["embed_tokens"]["embedding"].at[token, 0].set(value)
    return Target.from_params(target.config, {**target.params, "embed_tokens": {"embedding": table}})


def fault():
    """Returns a token that only the first row emits, its place in that row, and the right texts of both rows."""
    texts = eagle_jax.generate(tiny_target(VOCAB), None, PROMPTS, max_new_tokens=30).tokens
    for at, token in enumerate(texts[0]):
        if token not in texts[1] + PROMPTS[0] + PROMPTS[1] and token not in texts[0][:at] and at > 1:
            return token, at, texts
    raise AssertionError("no token fits: choose other prompts")


def test_a_row_ends_before_the_fault_and_other_rows_keep_their_text():
    token, at, texts = fault()
    target = with_nan(token)
    head = DRAFTERS["eagle3-k3n12"](tiny_target(VOCAB)).rebind(target)
    with pytest.raises(eagle_jax.NotFiniteError, match=f"row 0, generated token {at + 1}") as caught:
        eagle_jax.generate(target, head, PROMPTS, max_new_tokens=30)
    assert caught.value.positions == {0: at + 1}
    assert caught.value.output.tokens == [texts[0][: at + 1], texts[1]]
    session = sessions.Session(target, head, context=128)
    for stream in (eagle_jax.stream(target, head, PROMPTS[0], max_new_tokens=30),
                   session.stream(PROMPTS[0], max_new_tokens=30)):  # fmt: skip
        seen = []
        with pytest.raises(eagle_jax.NotFiniteError):
            seen += (token for chunk in stream for token in chunk.tokens)
        assert seen == texts[0][: at + 1]
    prompt = [*PROMPTS[0], PROMPTS[0][0]]
    list(session.stream(prompt, max_new_tokens=1, plain=True))
    assert session.read == len(prompt)  # the caches may hold NaN: the session emptied them


def test_a_nan_in_the_padding_token_changes_nothing():
    """Prompts are padded with token 0; its keys and values must not reach a row by 0 * NaN."""
    prompts = [[5, 7, 3], [4, 1, 6, 2, 9, 8, 5]]
    clean, bad = tiny_target(VOCAB), with_nan(0)
    head = DRAFTERS["eagle3-k3n12"](clean)
    texts = eagle_jax.generate(clean, head, prompts, max_new_tokens=2).tokens
    assert not any(0 in row for row in texts)
    assert eagle_jax.generate(bad, head.rebind(bad), prompts, max_new_tokens=2).tokens == texts


def test_a_row_that_stops_before_the_fault_raises_no_error():
    token, at, texts = fault()
    target = with_nan(token)
    assert eagle_jax.generate(target, None, PROMPTS, max_new_tokens=[at + 1, 30]).tokens[0] == texts[0][: at + 1]
    stopped = eagle_jax.generate(target, None, PROMPTS[:1], max_new_tokens=30, eos_ids=token).tokens
    assert stopped == [texts[0][: at + 1]]


def test_nan_drafts_raise_an_error_and_change_no_text():
    target = tiny_target(VOCAB)
    head = DRAFTERS["eagle3-k3n12"](target)
    params = jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf * jnp.nan, head.params)
    texts = eagle_jax.generate(target, None, PROMPTS, max_new_tokens=30).tokens
    message = "drafter's scores are NaN from row 0, generated token 1"
    with pytest.raises(eagle_jax.NotFiniteError, match=message) as found:
        eagle_jax.generate(target, dataclasses.replace(head, params=params), PROMPTS, max_new_tokens=30)
    assert found.value.drafts == {0: 1, 1: 1} and not found.value.positions
    assert found.value.output.tokens == texts


def test_a_conversation_ends_where_the_target_has_no_finite_logits(monkeypatch):
    tokenizer = eagle_jax.load_demo()[2]
    reply = tokenizer.encode("Hello.<|end|>", add_special_tokens=False)

    def faulty(*_, max_new_tokens, **__):
        output = eagle_jax.GenerateOutput([reply[:1], reply], np.ones(2, int), np.ones((2, 1), int))
        raise eagle_jax.NotFiniteError({0: 1}, {}, output)

    monkeypatch.setattr(eagle_jax, "generate", faulty)
    args = regenerate.Args(target="demo", data=(), out=Path(), max_new_tokens=9, max_prompt=99)
    writer = regenerate.Writer(args, tiny_target(VOCAB), None, tokenizer, (reply[-1],), lanes=2)
    asked = Dialogue.begin(parse_row({"prompt": "hi"}))
    found = writer.generate_replies([regenerate.Row(number, "a", asked, 1.0) for number in range(2)])
    assert found[0][1]["skipped"] == {"the target's logits are not finite": 1}
    assert not found[0][0].texts
    assert found[1][0].texts[0].messages[-1]["content"] == "Hello."
