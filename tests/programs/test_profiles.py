"""Checks profiles: strict reading, their target, and the choice and tokens of drafter="auto"."""

from __future__ import annotations

import os
import warnings

import jax
import numpy as np
import pytest
import yaml

import eagle_jax
from eagle_jax.config import ConfigError, TreeConfig
from eagle_jax.core import CycleCost
from eagle_jax.runtime import profile as profiles
from eagle_jax.runtime.generation import request_of
from eagle_jax.runtime.profile import Entry, ProfileFile, fingerprint, load_profile
from eagle_jax.runtime.target import Target
from eagle_jax.settings import load_yaml
from tests.models import random_prompts, tiny_head, tiny_target

TREE = TreeConfig(2, 2, 5)
LONGER = CycleCost((1, 4, 6), (1.0, 1.1, 1.2), 0.03, slots=640.0)
COST = CycleCost((1, 4, 6), (1.0, 1.2, 1.5), 0.05, slots=256.0, longer=LONGER)
HEAD = Entry(1, 0.0, "eagle3", "some/head", TREE, cost=COST, predicted=1.9, measured=2.0, worst=1.5)
LOOKUP = {"method": "pld", "ngram": 2, "length": 3}
ENTRIES = (
    HEAD,
    Entry(1, 1.0, "eagle3", "some/head", TreeConfig.chain(2)),
    Entry(4, 0.0, prompt=6, **LOOKUP),
    Entry(4, 0.0, "lookahead", prompt=50, ngram=3, window=2, guesses=2),
    Entry(4, 1.0),
)


@pytest.fixture
def loads(monkeypatch):
    """Returns the paths of the weights that were loaded, and loads a tiny head instead."""
    found = []
    monkeypatch.setattr(profiles, "load_drafter", lambda path, target: found.append(path) or tiny_head("eagle3", TREE))
    return found


def content(*entries: Entry) -> ProfileFile:
    target = tiny_target()
    return ProfileFile("eagle_jax.profile/1", target.name, fingerprint(target), target.dtype, "here", entries)


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "profile.yaml"
    file.write_text(content(*ENTRIES).to_yaml("a comment"))
    return file


def test_a_profile_survives_its_file(path):
    static = Entry(1, 0.0, "medusa", "x", TreeConfig.static([-1, -1, 0]))
    file = content(static, Entry(1, 2.0, shortest=2, latest=True, **LOOKUP), *ENTRIES[1:])
    path.write_text(file.to_yaml("a comment"))
    assert load_yaml(ProfileFile, path) == file
    text = path.read_text()
    assert text.startswith("# a comment\nschema: eagle_jax.profile/1\n")
    assert text.count("\n") == 7 + len(file.entries)  # an entry is a line


@pytest.mark.parametrize(
    ("batch", "temperature", "prompt", "entry"),
    [
        (1, 0.0, 999, 0),
        (1, 0.3, 9, 1),  # drafts are worth less as the temperature grows: the next one measured above
        (2, 0.0, 6, 2),
        (4, 0.0, 7, 3),  # the shortest bound that fits
        (4, 0.0, 51, 4),  # no bound fits: the next temperature
        (1, 1.5, 9, None),  # beyond what was measured: plain decoding
        (5, 0.0, 9, None),
    ],
)
def test_the_entry_is_chosen_by_batch_temperature_and_length(batch, temperature, prompt, entry):
    found = content(*reversed(ENTRIES)).find(batch, temperature, prompt)
    assert found == (None if entry is None else ENTRIES[entry])


def test_auto_follows_the_profile_and_keeps_the_text(path, loads):
    target, prompts = tiny_target(), random_prompts([5, 6], 12)
    profile = load_profile(path, target)
    assert loads == ["some/head"]  # once for both trees
    assert profile.choose(2, 0.0, 6)[0].drafter.depth == LOOKUP["length"]
    assert profile.choose(64, 0.0, 9) == profile.choose(4, 1.0, 9) == (None, None, None)
    auto = eagle_jax.generate(target, "auto", prompts, profile=path, max_new_tokens=12)
    assert auto.tokens == eagle_jax.generate(target, None, prompts, max_new_tokens=12).tokens
    assert auto.accepted.shape[1] == LOOKUP["length"] + 1
    assert request_of(target, "auto", prompts[:1], path).engine.cycle_cost == COST
    assert request_of(target, "auto", prompts[:1], path, cycle_cost=2).engine.cycle_cost == CycleCost((6,), (2.0,))
    assert request_of(target, "auto", prompts, path).engine.cycle_cost is None


def test_auto_begins_with_what_the_tuning_predicted(path, loads):
    """Of one token there is no cycle: the payoff after the call is that before it."""
    target, prompts = tiny_target(), random_prompts([5], 12)
    run = {"profile": path, "max_new_tokens": 1}
    for call in (eagle_jax.generate, eagle_jax.rollout):
        begun = call(target, "auto", prompts, **run).payoff
        assert (begun.gained, begun.spent) == (pytest.approx(32 * 1.9), 32)
        given = call(target, "auto", prompts, payoff=begun._replace(gained=np.float32(3)), **run).payoff
        assert given.gained == 3, "an earlier call knows better"
        assert call(target, "auto", prompts, cycle_cost=COST, **run).payoff.spent == 0, "costs of another tree"
        assert call(target, "auto", random_prompts([5, 6], 12), **run).payoff is None, "an entry without costs"


def test_settings_and_bundled_weights_are_bound(loads):
    target = tiny_target()
    given = {"ngram": 2, "length": 3, "shortest": 2, "latest": True}
    bound = Entry(1, 0.0, "pld", **given).bind(target, {})
    assert bound.drafter is eagle_jax.prompt_lookup(target, **given).drafter
    Entry(1, 0.0, "eagle3", "bundled", TREE).bind(target, {})
    assert os.path.isfile(os.path.join(loads[0], "model.safetensors"))


def test_a_path_is_loaded_once_until_it_changes(path, loads):
    target = tiny_target()
    first = profiles.bound_profile(path, target)
    assert profiles.bound_profile(str(path), target) is profiles.bound_profile(first, target) is first
    path.write_text(content(HEAD).to_yaml())
    os.utime(path, ns=(1, 1))
    second = profiles.bound_profile(path, target)
    assert len(second.drafters) == 1
    again = Target.from_params(target.config, target.params)
    assert profiles.bound_profile(path, again) is not second  # other arrays, other drafters
    assert len(loads) == 3


def test_different_targets_have_different_fingerprints():
    target = tiny_target()
    assert fingerprint(target) == fingerprint(Target.from_params(target.config, target.params, "elsewhere"))
    changed = jax.tree.map(lambda leaf: leaf + 0.01, target.params)
    others = [Target.from_params(target.config, changed), tiny_target(seed=3), tiny_target(layers=3)]
    assert len({fingerprint(one) for one in [target, *others]}) == 4


def test_another_target_or_dtype_is_an_error_and_another_machine_a_warning(path, loads, monkeypatch):
    target, other = tiny_target(), tiny_target(seed=3)
    half = Target.from_params(target.config, jax.tree.map(lambda leaf: leaf.astype("bfloat16"), target.params))
    for wrong in (other, half):
        with pytest.raises(ConfigError, match=r"target must be the one that .* was tuned for, 'target' \("):
            load_profile(path, wrong)
    with pytest.warns(UserWarning, match=r"tuned on 'here', and this is '.*': the text is the same"):
        bound = load_profile(path, target)
    with pytest.raises(ValueError, match="profile must be for target"):
        eagle_jax.generate(tiny_target(vocab=13), "auto", [[1]], profile=bound)
    monkeypatch.setattr(profiles, "machine", lambda: "here")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_profile(path, target)


PLACE = {"batch": 1, "temperature": 0.0}
HEADS = PLACE | {"method": "eagle3", "weights": "x"}
PRICE = {"rows": [1], "passes": [1.0]}
NODE = {"depth": 1, "top_k": 1, "num_nodes": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "eagle_jax.profile/2"}, "schema must be one of 'eagle_jax.profile/1', got 'eagle_jax.profile/2'"),
        ({"entries": []}, "entries must hold an entry, got none"),
        ({"entries": [{"batch": 1}]}, r"entries\[0\]: the keys temperature must be given"),
        ({"entries": [PLACE | {"batch": 0}]}, "batch must be at least 1, got 0"),
        ({"entries": [PLACE | {"predicted": -1.0}]}, "predicted must be at least 0, got -1.0"),
        ({"entries": [PLACE | {"prompt": 9}] * 2}, "entries must have one of each"),
        ({"entries": [PLACE | {"method": "eagle2"}]}, "eagle2 must be weights, tree, got weights None"),
        ({"entries": [PLACE | {"ngram": 2}]}, "fields of method vanilla must be none, got ngram 2"),
        ({"entries": [HEADS | {"tree": {"depth": 9, "top_k": 2, "num_nodes": 4}}]}, r"entries\[0\]: tree: .*num_nodes"),
        ({"entries": [HEADS | {"tree": NODE | {"verification": "block"}}]}, "must be deterministic in a profile, got"),
        ({"entries": [PLACE | {"cost": PRICE}]}, "cost must be left out with method vanilla"),
        ({"entries": [HEADS | {"tree": NODE, "cost": PRICE}]}, "CycleCost must reach the 2 rows of this tree"),
        ({"entries": [HEADS | {"tree": NODE, "cost": PRICE | {"rows": [0]}}]}, r"cost: CycleCost\.rows must ascend"),
    ],
)
def test_an_invalid_profile_is_an_error(path, change, message):
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message) as caught:
        load_profile(path, tiny_target())
    assert str(path) in str(caught.value)


def test_an_argument_that_is_no_profile_is_an_error(path, tmp_path):
    target = tiny_target()
    with pytest.raises(ConfigError, match=r"profile must be a file, got .*none.yaml, which does not exist"):
        load_profile(tmp_path / "none.yaml", target)
    for drafter, wrong, message in (
        ("auto", None, 'given with drafter="auto": .* load_profile, got None'),
        ("auto", 3, 'given with drafter="auto": .* load_profile, got 3'),
        (None, path, 'profile must be None unless drafter is "auto"'),
        ("auto", tmp_path / "none.yaml", str(tmp_path / "none.yaml")),
    ):
        with pytest.raises(ValueError, match=message):
            eagle_jax.generate(target, drafter, [[1]], profile=wrong)
    path.write_text("schema: [")
    with pytest.raises(ConfigError, match=r"profile\.yaml"):
        load_profile(path, target)


def test_an_error_about_missing_weights_names_the_entry(path, tmp_path):
    path.write_text(content(Entry(1, 0.0), Entry(1, 1.0, "eagle3", str(tmp_path / "nothere"), TREE)).to_yaml())
    with pytest.raises(ValueError, match=r"profile\.yaml, entries\[1\], eagle3: .*nothere"):
        load_profile(path, tiny_target())
