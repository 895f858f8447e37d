"""Logits that are not finite end a row before the token that they would give; the other rows keep their text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.data.chat.dialogues import Dialogue
from eagle_jax.evaluate.acceptance import measure_n_alpha, record_cycles
from eagle_jax.runtime import session as sessions
from eagle_jax.runtime.target import Target
from infer.tuning.shadow import record
from tests.models import DRAFTERS, random_prompts, tiny_target
from train.loop import dialogues

VOCAB = 20
PROMPTS = random_prompts([4, 7], VOCAB, seed=5)
METHODS = ["eagle1-chain4", "eagle3-k8n128", "eagle3-static", "eagle3-tree-rejection", "medusa-k3n12", "lookahead"]


def with_nan(token, value=np.nan):
    """`tiny_target` with a value in the embedding of `token`."""
    target = tiny_target(VOCAB)
    table = target.params["embed_tokens"]["embedding"].at[token, 0].set(value)
    return Target.from_params(target.config, {**target.params, "embed_tokens": {"embedding": table}})


def fault():
    """(a token that the first row emits and nothing else holds, its place in that row, both rows' right texts)."""
    texts = eagle_jax.generate(tiny_target(VOCAB), None, PROMPTS, max_new_tokens=30).tokens
    for at, token in enumerate(texts[0]):
        if token not in texts[1] + PROMPTS[0] + PROMPTS[1] and token not in texts[0][:at] and at > 1:
            return token, at, texts
    raise AssertionError("no token fits: take other prompts")


@pytest.mark.parametrize("method", [None, *METHODS])
def test_a_row_ends_before_the_fault_and_the_others_keep_their_text(method):
    token, at, texts = fault()
    target = with_nan(token)
    head = None if method is None else DRAFTERS[method](tiny_target(VOCAB)).on(target)
    with pytest.raises(eagle_jax.NotFiniteError, match=f"row 0, generated token {at + 1}") as caught:
        eagle_jax.generate(target, head, PROMPTS, max_new_tokens=30)
    assert caught.value.positions == {0: at + 1}
    assert caught.value.output.tokens == [texts[0][: at + 1], texts[1]]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_prompt_without_finite_logits_gives_no_token(value):
    target = with_nan(PROMPTS[0][1], value)
    with pytest.raises(eagle_jax.NotFiniteError, match="row 0, generated token 0") as caught:
        eagle_jax.generate(target, None, [PROMPTS[0], [PROMPTS[0][0]]], max_new_tokens=1, temperature=1.0, key=0)
    assert caught.value.output.tokens[0] == []
    assert len(caught.value.output.tokens[1]) == 1


def test_a_nan_in_the_padding_token_changes_nothing():
    prompts = [[5, 7, 3], [4, 1, 6, 2, 9, 8, 5]]
    table = tiny_target(VOCAB).params["embed_tokens"]["embedding"]
    clean = with_nan(0, table[0, 0])
    head = DRAFTERS["eagle3-k3n12"](tiny_target(VOCAB))
    texts = eagle_jax.generate(clean, head.on(clean), prompts, max_new_tokens=2).tokens
    assert not any(0 in row for row in texts)
    bad = with_nan(0)
    assert eagle_jax.generate(bad, head.on(bad), prompts, max_new_tokens=2).tokens == texts


def test_a_row_that_stopped_before_is_no_fault():
    token, at, texts = fault()
    target = with_nan(token)
    assert eagle_jax.generate(target, None, PROMPTS, max_new_tokens=[at + 1, 30]).tokens[0] == texts[0][: at + 1]
    stopped = eagle_jax.generate(target, None, PROMPTS[:1], max_new_tokens=30, eos_ids=token).tokens
    assert stopped == [texts[0][: at + 1]]


def test_a_stream_and_a_session_raise_behind_the_last_good_token():
    token, at, texts = fault()
    target = with_nan(token)
    head = DRAFTERS["eagle3-k3n12"](tiny_target(VOCAB)).on(target)
    session = sessions.Session(target, head, context=128)
    for stream in (eagle_jax.stream(target, head, PROMPTS[0], max_new_tokens=30),
                   session.stream(PROMPTS[0], max_new_tokens=30)):  # fmt: skip
        seen = []
        with pytest.raises(eagle_jax.NotFiniteError):
            seen += (token for chunk in stream for token in chunk.tokens)
        assert seen == texts[0][: at + 1]
    again = [token for chunk in session.stream(PROMPTS[1], max_new_tokens=30, plain=True) for token in chunk.tokens]
    assert again == texts[1]


def test_a_session_reads_anew_behind_a_fault():
    """The head's cache may hold what it made of the token without finite logits."""
    token, _, _ = fault()
    target = with_nan(token)
    session = sessions.Session(target, DRAFTERS["eagle3-k3n12"](tiny_target(VOCAB)).on(target), context=128)
    with pytest.raises(eagle_jax.NotFiniteError):
        list(session.stream(PROMPTS[0], max_new_tokens=30))
    prompt = [*PROMPTS[0], PROMPTS[0][0]]
    list(session.stream(prompt, max_new_tokens=1, plain=True))
    assert session.read == len(prompt)


@pytest.mark.parametrize("method", ["eagle3-k3n12", "eagle1-chain4", "eagle3-tree-rejection", "small-chain"])
def test_drafts_that_are_nan_leave_the_text_and_are_named(method):
    target = tiny_target(VOCAB)
    head = DRAFTERS[method](target)
    params = jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf * jnp.nan, head.params)
    broken = type(head).of(head.plain, target, params, **{
        name: getattr(head, name) for name in ("config", "tree", "model", "vocab_size") if hasattr(head, name)
    })  # fmt: skip
    texts = eagle_jax.generate(target, None, PROMPTS, max_new_tokens=9).tokens
    with pytest.raises(
        eagle_jax.NotFiniteError, match="drafter's scores are NaN from row 0, generated token 1"
    ) as found:
        eagle_jax.generate(target, broken, PROMPTS, max_new_tokens=9)
    assert found.value.drafts == {0: 1, 1: 1} and not found.value.positions
    assert found.value.output.tokens == texts


@pytest.mark.parametrize("measure", [record, record_cycles, measure_n_alpha])
def test_what_measures_heads_raises_too(measure):
    token, at, _ = fault()
    target = with_nan(token)
    head = DRAFTERS["eagle3-k3n12"](tiny_target(VOCAB)).on(target)
    with pytest.raises(eagle_jax.NotFiniteError, match=f"row 0, generated token {at + 1}"):
        measure(target, head, PROMPTS, max_new_tokens=30)


def test_a_conversation_ends_where_the_target_has_no_finite_logits(monkeypatch):
    tokenizer = eagle_jax.load_demo()[2]
    reply = tokenizer.encode("Hello.<|end|>", add_special_tokens=False)

    def faulty(*_, max_new_tokens, **__):
        output = eagle_jax.GenerateOutput([reply[:1], reply], np.ones(2, int), np.ones((2, 1), int))
        raise eagle_jax.NotFiniteError({0: 1}, {}, output)

    monkeypatch.setattr(dialogues, "generate", faulty)
    writer = dialogues.Writer(
        tiny_target(VOCAB), None, tokenizer, (reply[-1],), lanes=2, max_new_tokens=9, max_prompt=99, top_k=0, top_p=1.0,
        keep_cut=True, seed=0,
    )  # fmt: skip
    asked = Dialogue.begin([{"role": "user", "content": "hi"}])
    found = writer.converse([dialogues.Row(number, "a", asked, 1.0) for number in range(2)])
    assert found[0][1]["skipped"] == {"the target's logits are not finite": 1}
    assert not found[0][0].texts
    assert found[1][0].texts[0].messages[-1]["content"] == "Hello."
