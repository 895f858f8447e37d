"""Methods as calls: the prefill alone is the beginning of the whole, by the same program."""

from __future__ import annotations

import jax
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.runtime import generation
from infer.common.calls import engine, keys_of
from tests.models import random_prompts, tiny_head, tiny_target


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafted", [False, True])
def test_the_prefill_compiles_nothing_of_its_own(temperature, drafted):
    head = tiny_head("eagle3", TreeConfig.chain(2), draft_vocab=10).on(tiny_target()) if drafted else None
    method = engine(tiny_target(), head, 8, temperature)
    prompts = random_prompts([5, 3], 12)
    keys = keys_of(7, ["a", "b"], 0)
    whole = method.answer(prompts, keys)
    compiled = generation.generate_program._cache_size()
    first = method.prefill(prompts, keys)
    assert generation.generate_program._cache_size() == compiled
    assert first.tokens == [tokens[:1] for tokens in whole.tokens]
    assert [len(tokens) for tokens in whole.tokens] == [8, 8]
    assert [sum(row) for row in whole.accepted] == whole.cycles


def test_a_prefill_makes_no_cycle_and_is_checked_like_generate():
    assert generation.first_tokens(tiny_target(), None, random_prompts([5, 3], 12)).cycles.tolist() == [0, 0]
    with pytest.raises(ValueError, match="max_new_tokens must be an integer of at least 1, got 0"):
        generation.first_tokens(tiny_target(), None, [[1]], max_new_tokens=0)


def test_every_question_and_turn_has_draws_of_its_own():
    """Or questions would not be independent; and a batch would change their texts."""
    together = jax.random.key_data(keys_of(0, ["a", "b", "a:1"], 0)).tolist()
    assert len({tuple(key) for key in together}) == 3
    assert jax.random.key_data(keys_of(0, ["b"], 0)).tolist() == together[1:2]
    for seed, turn in ((0, 1), (1, 0)):
        assert jax.random.key_data(keys_of(seed, ["b"], turn)).tolist() != together[1:2]
