"""Checks `train.grpo`: rewards, the loss, and a policy whose drafters all give the same texts."""

from __future__ import annotations

import json
import os
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eagle_jax
import train.grpo
from eagle_jax.config import TreeConfig
from eagle_jax.models import Decoder
from eagle_jax.runtime.rollouts import advance_program, start_program
from eagle_jax.training import adapt
from tests.models import random_prompts, tiny_head, tiny_target
from tests.programs.conftest import ByteTokenizer
from train.loop import policy
from train.loop.policy import Samples

SIZES = dict(
    questions=4, questions_per_step=2, samples=2, max_prompt=90, max_new_tokens=10, lanes=2, steps=2, rate=1e-2,
    head_rate=1e-3,
)  # fmt: skip


@pytest.fixture
def pair(monkeypatch):
    """Makes `eagle_jax.load_demo` return a random pair of 258 tokens."""
    target = tiny_target(258)
    head = tiny_head("eagle3", TreeConfig(2, 2, 4), 258)
    monkeypatch.setattr(eagle_jax, "load_demo", lambda name: (target, head, ByteTokenizer()))
    return target


@pytest.mark.parametrize(
    ("text", "ended", "score"),
    [
        ("no digits", False, 0.0),
        ("no digits", True, 0.2),
        ("It is 5", False, 0.6),
        ("It is 5\n#### 5", True, 1.0),
        ("It is 5\n#### 10", True, 0.6),  # wrong by 100 %
        ("#### 4", False, 0.4 + 0.4 * 0.5 * 0.8),
        ("1,005.0 and 5", False, 0.6),
        ("5 and -5", False, 0.2),
    ],
)
def test_a_reward_rises_by_degrees(text, ended, score):
    assert policy.reward(text, ended, 5.0) == pytest.approx(score)


def test_a_number_is_the_marked_one_or_the_last():
    assert policy.number_of("2 then #### $1,200.50 then 7") == 1200.5
    assert policy.number_of("2 then -7.") == -7
    assert policy.number_of("none") is None


def test_generated_questions_have_their_answers():
    questions = policy.arithmetic(60, seed=1)
    assert questions == policy.arithmetic(60, seed=1) != policy.arithmetic(60, seed=2)
    rules = {"buys": lambda a, b: a + b, "gives": lambda a, b: a - b, "boxes": lambda a, b: a * b}
    seen = set()
    for text, answer in questions:
        first, second = map(int, re.findall(r"\d+", text))
        (word,) = (word for word in rules if word in text)
        seen.add(word)
        assert rules[word](first, second) == answer and answer >= 2
    assert seen == set(rules)


def test_advantages_compare_the_replies_of_a_group():
    found = policy.advantages(np.array([[1.0, 3.0, 1.0, 3.0], [0.1, 0.1, 0.1, 0.1], [0.0, 0.0, 0.0, 4.0]]))
    np.testing.assert_allclose(found[0], [-1, 1, -1, 1])
    assert not found[1].any()
    np.testing.assert_allclose(found[2], np.array([-1, -1, -1, 3]) / np.sqrt(3), rtol=1e-6)


def samples_of(tokens, is_reply, log_probs, advantage):
    return Samples(*map(jnp.asarray, (tokens, is_reply, log_probs, np.float32(advantage))))


def test_the_gradient_before_an_update_is_that_of_the_plain_formula():
    """Ratios are 1: the gradient is the mean over replies of advantage times the mean log-probability."""
    target = tiny_target()
    tokens = np.asarray(random_prompts([9, 9, 9], 12), np.int32)
    is_reply = np.zeros((3, 9), bool)
    is_reply[0, 4:9], is_reply[1, 4:6], is_reply[2, 4:7] = True, True, True
    weights = np.float32([1.5, -0.5, -1.0])
    old = policy.text_log_probs(target.config, target.params, jnp.asarray(tokens), 0.7)
    samples = samples_of(tokens, is_reply, old, weights)

    @jax.jit
    @jax.grad
    def gradient(params):
        total, logits = 0.0, Decoder(target.config).apply({"params": params}, jnp.asarray(tokens), method="all_logits")
        laws = jax.nn.log_softmax(logits / 0.7)
        for row, text in enumerate(tokens):
            own = [laws[row, at - 1, text[at]] for at in np.flatnonzero(is_reply[row])]
            total -= weights[row] * sum(own) / len(own) / 3
        return total

    wanted = gradient(target.params)
    tx = optax.sgd(1.0)
    new, _, loss = policy.update_policy(
        target.config, tx, 0.2, 0.0, target.params, tx.init(target.params), samples, jnp.float32(0.7), target.params
    )
    found = jax.tree.map(jnp.subtract, target.params, new)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, wanted)
    assert float(loss) == pytest.approx(-weights.mean(), abs=1e-5)


def test_a_ratio_beyond_the_bound_stops_its_gradient():
    """In the direction that the advantage has pushed already, and in no other; prompts and padding have none."""
    new = jnp.log(jnp.array([[1.5, 1.1, 0.5], [1.5, 1.1, 0.5]]))
    zero = np.zeros((2, 3), np.float32)
    samples = samples_of(zero.astype(np.int32), zero == 0, zero, [2.0, -2.0])
    found = jax.grad(policy.grpo_loss)(new, samples, 0.2, 0.0)
    np.testing.assert_allclose(found * 6, [[0, -2.2, -1], [3, 2.2, 0]], atol=1e-5)
    shorter = samples._replace(is_reply=jnp.array([[False, True, False]] * 2))
    found = jax.grad(policy.grpo_loss)(new.at[:, 0].set(1e3), shorter, 0.2, 0.0)
    np.testing.assert_allclose(found * 2, [[0, -2.2, 0], [0, 2.2, 0]], atol=1e-5)


def test_the_divergence_pulls_towards_the_reference():
    new, reference = jnp.array([[0.3, -0.2]]), jnp.array([[0.0, 0.4]])
    samples = samples_of(np.zeros((1, 2), np.int32), np.ones((1, 2), bool), new, [0.0])
    found = jax.grad(policy.grpo_loss)(new, samples, 0.2, 0.5, reference)
    np.testing.assert_allclose(found, 0.5 * (1 - np.exp(reference - new)) / 2, rtol=1e-5)
    assert not jax.grad(policy.grpo_loss)(new, samples, 0.2, 0.0, reference).any()


def test_log_probabilities_are_those_of_the_rollout():
    target, prompts = tiny_target(), random_prompts([3, 6], 12)
    out = eagle_jax.rollout(target, None, prompts, max_new_tokens=[7, 4], temperature=0.7, key=1, log_probs="law")
    tokens, is_reply = np.zeros((2, 12), np.int32), np.zeros((2, 12), bool)
    for row, (prompt, text) in enumerate(zip(prompts, out.tokens, strict=True)):
        tokens[row, : len(prompt) + len(text)] = [*prompt, *text]
        is_reply[row, len(prompt) : len(prompt) + len(text)] = True
    placed = policy.place_replies(jnp.asarray(is_reply), out.log_probs)
    found = policy.text_log_probs(target.config, target.params, jnp.asarray(tokens), 0.7)
    np.testing.assert_allclose(np.where(is_reply, found, 0), placed, atol=1e-4)
    assert is_reply.sum() == 11


def run(tmp_path, capsys, **changes):
    """Runs the program; returns its status, the result file and the last line."""
    status = train.grpo.main(train.grpo.Args(out=tmp_path / "out", **SIZES | changes))
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    return status, result, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_run_writes_a_record_per_step(pair, tmp_path, capsys):
    status, result, last = run(tmp_path, capsys, drafters="adapted", head_rate=3e-2)
    assert status == 0
    assert [step["step"] for step in result["steps"]] == [0, 1] and last["steps"] == 2
    assert result["settings"]["rate"] == 1e-2 and result["machine"] and "out" not in result["settings"]
    for step in result["steps"]:
        assert step["different"] == 0 and set(step["tau"]) == {"adapted"}
        assert 0 <= step["reward"] <= 1 and np.isfinite([step["loss"], step["head_loss"]]).all()


@pytest.mark.slow
def test_a_run_records_every_drafter_on_the_same_texts(pair, tmp_path, capsys):
    names = {"plain", "frozen", "adapted"}
    status, result, last = run(
        tmp_path, capsys, drafters="frozen,adapted", times=2, figure=True, steps=3, kl=0.1, head_rate=3e-2
    )
    assert status == 0
    assert last["steps"] == 3
    for step in result["steps"]:
        assert step["different"] == 0
        assert set(step["tau"]) == set(step["passes"]) == names
        assert step["tau"]["plain"] == 1
        assert ("seconds" in step) == (step["step"] != 1)  # every second step is timed
    timed = [result["steps"][at]["seconds"] for at in (0, 2)]
    assert all(set(seconds) == names and min(seconds.values()) > 0 for seconds in timed)
    assert last["seconds"] == {name: [seconds[name] for seconds in timed] for name in names}
    first = result["steps"][0]["tau"]
    assert first["frozen"] == first["adapted"], "the head has not been updated yet"
    assert any(step["tau"]["frozen"] != step["tau"]["adapted"] for step in result["steps"][1:])
    ends = [result["steps"][at]["tau"]["adapted"] for at in (0, 2)]  # a fifth of three steps is one
    assert last["tau"]["adapted"] == pytest.approx(ends, abs=1e-3)
    assert (tmp_path / "out" / "grpo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_steps_compile_nothing_and_change_policy_head_and_history(pair):
    args = train.grpo.Args(out=None, **SIZES)
    loop = train.grpo.Loop(args, train.grpo.check(args))
    programs = start_program, advance_program, adapt, policy.update_policy
    for number in range(5):  # then the history has all of its rounds, and its sizes no longer change
        loop.step(number)
    before = [program._cache_size() for program in programs]
    params, head = loop.target.params, loop.head_state.head
    drafters = loop.drafters(0)
    for params_of in (drafters["history"].params, drafters["adapted+history"].params["chain"]):
        held = params_of["history"].tokens.tolist()
        assert str(loop.rounds[0][0][0])[1:-1] in str(held), "the replies of the round before"
    assert drafters["frozen"].params["head"] is loop.head.params["head"]
    for number in range(5, 7):
        loop.step(number)
    assert [program._cache_size() for program in programs] == before
    for old, new in ((params, loop.target.params), (head, loop.head_state.head)):
        assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (old, new)), strict=True))
    samples = loop.rounds[0]
    assert len(samples) == train.grpo.ROUNDS and [len(each) for each in samples] == [4, 4]


@pytest.mark.slow
def test_the_policy_learns_a_reward(pair, monkeypatch):
    """Replies shall be ASCII, as half of the random policy's tokens are."""
    monkeypatch.setattr(train.grpo, "reward", lambda text, ended, answer: float(sum(map(str.isascii, text))))
    sizes = SIZES | {"samples": 8, "max_new_tokens": 6, "lanes": 8, "rate": 2e-2, "drafters": "frozen"}
    loop = train.grpo.Loop(train.grpo.Args(out=None, **sizes), ["frozen"])
    rewards = [loop.step(number)["reward"] for number in range(12)]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 1
    assert loop.head_state.head is loop.head.params["head"], "no drafter is adapted"


@pytest.mark.slow
def test_texts_that_differ_are_counted_and_fail_the_run(pair, tmp_path, capsys, monkeypatch):
    original = eagle_jax.rollout

    def biased(target, drafter, *args, **options):
        out = original(target, drafter, *args, **options)
        if isinstance(drafter, eagle_jax.runtime.drafters.PromptLookup):
            out.tokens[0][-1] += 1
        return out

    monkeypatch.setattr(eagle_jax, "rollout", biased)
    status, result, last = run(tmp_path, capsys)
    assert status == 1
    assert [step["different"] for step in result["steps"]] == [1, 1] and last["different"] == 2


@pytest.mark.slow
def test_ctrl_c_keeps_the_steps_so_far(pair, tmp_path, capsys, monkeypatch):
    original = train.grpo.Loop.step

    def step(self, number):
        if number == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, number)

    monkeypatch.setattr(train.grpo.Loop, "step", step)
    status, result, last = run(tmp_path, capsys, steps=50, drafters="history")
    assert status == 130
    assert len(result["steps"]) == last["steps"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 1}, "--samples must be at least 2, got 1"),
        ({"temperature": 0.0}, "--temperature must be above 0, got 0.0"),
        ({"questions": 5}, "--questions must be a multiple of --questions-per-step, 2, got 5"),
        ({"drafters": "frozen,medusa"}, "--drafters must be of plain, .*, got 'medusa'"),
        ({"drafters": ""}, "--drafters must have at least one value"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"kl": -0.1}, "--kl must be at least 0, got -0.1"),
        ({"seed": -1}, "--seed must be from 0"),
        ({"max_prompt": 3}, "--questions must be at most the 0 prompts of at most --max-prompt 3 tokens, got 4"),
    ],
)
def test_bad_options_are_errors(pair, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train.grpo.main(train.grpo.Args(out=tmp_path / "out", **SIZES | changes))
    assert not (tmp_path / "out").exists()


def test_questions_are_read_with_their_numbers(pair, tmp_path):
    rows = [
        {"question": "Two and three?", "answer": "2 + 3 = <<2+3=5>>5\n#### 1,005"},
        {"messages": [{"role": "user", "content": "Four?"}, {"role": "assistant", "content": "It is 4."}]},
        {"question": "No number?", "answer": "none"},
        {"text": "7"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert policy.read_reference_questions(path) == [("Two and three?", 1005.0), ("Four?", 4.0)]
    args = train.grpo.Args(out=None, prompts=path, **SIZES | {"questions": 2})
    assert train.grpo.Loop(args, ["plain"]).prompts == [list(b"Two and three?"), list(b"Four?")]
    path.write_text(json.dumps(rows[2]))
    with pytest.raises(ValueError, match=r"--prompts .*rows.jsonl must hold questions .*, got an answer without a num"):
        policy.read_reference_questions(path)
