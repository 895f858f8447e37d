"""Profiles: read strictly, bound to their target, and followed by drafter="auto" without changing a token."""

from __future__ import annotations

import dataclasses
import os
import warnings

import jax
import pytest
import yaml

import eagle_jax
from eagle_jax.config import ConfigError, TreeConfig
from eagle_jax.runtime import profile as profiles
from eagle_jax.runtime.profile import Entry, ProfileFile, fingerprint, load_profile
from eagle_jax.runtime.target import Target
from eagle_jax.settings import load_yaml
from tests.models import random_prompts, tiny_head, tiny_target

TREE, CHAIN = TreeConfig(2, 2, 5), TreeConfig.chain(2)
HEAD = Entry(1, 0.0, "eagle3", "some/head", TREE, predicted=1.9, measured=2.0, worst=1.5)
LOOKUP = dict(method="pld", ngram=2, length=3)
LOOKAHEAD = dict(method="lookahead", ngram=3, window=2, guesses=2)
ENTRIES = (HEAD, Entry(1, 1.0, "eagle3", "some/head", CHAIN), Entry(4, 0.0, **LOOKUP), Entry(4, 1.0))


@pytest.fixture
def loads(monkeypatch):
    """Paths from which weights were read; they are a tiny head's."""
    found = []

    def load_drafter(path, target):
        found.append(path)
        return tiny_head("eagle3", TREE)

    monkeypatch.setattr(profiles, "load_drafter", load_drafter)
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
    assert load_yaml(ProfileFile, path) == content(*ENTRIES)
    text = path.read_text()
    assert text.startswith("# a comment\nschema: eagle_jax.profile/1\n")
    assert text.count("\n") == 7 + len(ENTRIES)  # an entry is a line
    static = Entry(1, 0.0, "medusa", "x", TreeConfig.static([-1, -1, 0]))
    others = (static, Entry(1, 1.0, **LOOKAHEAD), Entry(1, 2.0, **LOOKUP, shortest=2, latest=True))
    path.write_text(content(*others).to_yaml())
    assert load_yaml(ProfileFile, path).entries == others


def test_all_settings_of_prompt_lookup_are_bound():
    target, settings = tiny_target(), {"ngram": 2, "length": 3, "shortest": 2, "latest": True}
    bound = Entry(1, 0.0, "pld", **settings).bind(target, {})
    assert bound.drafter is eagle_jax.prompt_lookup(target, **settings).drafter
    assert bound.drafter is not Entry(1, 0.0, **LOOKUP).bind(target, {}).drafter


BY_PROMPT = (
    Entry(1, 1.0, prompt=100, **LOOKUP), Entry(1, 0.0), Entry(1, 0.0, prompt=500, **LOOKAHEAD),
    Entry(1, 0.0, prompt=100, **LOOKUP),
)  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "batch", "temperature", "prompt", "entry"),
    [
        (ENTRIES, 1, 0.0, 1000, 0),
        (ENTRIES, 1, 0.3, 1000, 1),  # drafts are worth less as the temperature grows: the next one measured above
        (ENTRIES, 1, 1.0, 1000, 1),
        (ENTRIES, 2, 0.0, 1000, 2),
        (ENTRIES, 4, 0.5, 1000, 3),
        (ENTRIES, 1, 1.5, 1000, None),  # beyond what was measured: plain decoding
        (ENTRIES, 5, 0.0, 1000, None),
        (BY_PROMPT, 1, 0.0, 100, 3),
        (BY_PROMPT, 1, 0.0, 101, 2),
        (BY_PROMPT, 1, 0.0, 501, 1),
        (BY_PROMPT, 1, 0.5, 50, 0),
        (BY_PROMPT, 1, 1.0, 101, None),
        ((Entry(1, 0.0), Entry(4, 1.0, **LOOKUP)), 1, 0.7, 9, 1),  # of a larger batch
    ],
)
def test_the_entry_is_chosen_by_batch_temperature_and_prompt(entries, batch, temperature, prompt, entry):
    assert content(*entries).find(batch, temperature, prompt) == (None if entry is None else entries[entry])


def test_auto_is_what_the_profile_chooses(path, loads):
    profile = load_profile(path, tiny_target())
    assert loads == ["some/head"]  # once for both trees
    assert profile.choose(1, 0.0, 9).tree == TREE
    assert profile.choose(1, 0.7, 9).tree == CHAIN
    assert profile.choose(3, 0.0, 9).drafter is eagle_jax.prompt_lookup(tiny_target(), ngram=2, length=3).drafter
    assert profile.choose(4, 1.0, 9) is profile.choose(64, 0.0, 9) is None


def test_auto_writes_the_text_of_plain_decoding(path, loads):
    """The longest of the prompts counts."""
    target = tiny_target()
    entries = (Entry(4, 0.0, "eagle3", "some/head", CHAIN, prompt=6), Entry(4, 0.0, **LOOKUP))
    path.write_text(content(*entries).to_yaml())
    for lengths, depth in (([5, 6], 2), ([5, 7], 3)):
        prompts = random_prompts(lengths, 12)
        auto = eagle_jax.generate(target, "auto", prompts, profile=path, max_new_tokens=8)
        assert auto.accepted.shape[1] == depth + 1
        assert auto.tokens == eagle_jax.generate(target, None, prompts, max_new_tokens=8).tokens
    chunks = eagle_jax.stream(target, "auto", prompts[0], profile=path, max_new_tokens=8)
    assert [token for chunk in chunks for token in chunk.tokens] == auto.tokens[0]


def test_a_path_is_loaded_once_until_it_changes(path, loads):
    target = tiny_target()
    first = profiles.bound_profile(path, target)
    assert profiles.bound_profile(str(path), target) is first
    path.write_text(content(HEAD).to_yaml())
    os.utime(path, ns=(1, 1))
    second = profiles.bound_profile(path, target)
    assert second is not first and len(second.drafters) == 1
    again = Target.from_params(target.config, target.params)
    assert profiles.bound_profile(path, again) is not second  # other arrays, other drafters
    assert len(loads) == 3
    assert profiles.bound_profile(first, target) is first


def test_fingerprints_tell_targets_apart():
    target = tiny_target()
    assert fingerprint(target) == fingerprint(Target.from_params(target.config, target.params, "elsewhere"))
    changed = jax.tree.map(lambda leaf: leaf + 0.01, target.params)
    others = [Target.from_params(target.config, changed), tiny_target(seed=3), tiny_target(layers=3)]
    assert len({fingerprint(one) for one in [target, *others]}) == 4


def test_another_target_or_dtype_is_refused(path, loads):
    other = tiny_target(seed=3)
    half = Target.from_params(other.config, jax.tree.map(lambda leaf: leaf.astype("bfloat16"), other.params))
    for target in (other, half):
        with pytest.raises(ConfigError, match=r"target must be the one .*'float32'\), got 'target' .*infer\.tune"):
            load_profile(path, target)
    bound = load_profile(path, tiny_target())
    with pytest.raises(ValueError, match="profile must be for target 'target', got one for another"):
        eagle_jax.generate(tiny_target(vocab=13), "auto", [[1]], profile=bound)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "eagle_jax.profile/2"}, "schema"),
        ({"machin": "x"}, "unknown key 'machin'. Did you mean 'machine'"),
        ({"entries": []}, "entries must hold an entry"),
        ({"entries": [{"batch": 1}]}, r"entries\[0\]: missing temperature"),
        ({"entries": [{"batch": 0, "temperature": 0.0}]}, "batch must be at least 1 .*, got 0"),
        ({"entries": [{"batch": 1, "temperature": 0.0, "prompt": 0}]}, "prompt must be at least 1 token, got 0"),
        ({"entries": [{"batch": 1, "temperature": 0.0, "prompt": 9}] * 2}, r"got \(1, 0.0, 9\) twice"),
        ({"entries": [{"batch": 1, "temperature": 0.0, "method": "eagle4"}]}, "method.*eagle4"),
        ({"entries": [{"batch": 1, "temperature": 0.0, "method": "eagle2"}]}, "method eagle2 needs weights"),
        ({"entries": [{"batch": 1, "temperature": 0.0, "ngram": 2}]}, "method vanilla takes no ngram"),
        ({"entries": [{"batch": 1, "temperature": 0.0, **LOOKAHEAD, "latest": True}]}, "lookahead takes no latest"),
        (
            {"entries": [{"batch": 1, "temperature": 0.0, "method": "eagle3", "weights": "x",
                          "tree": {"depth": 9, "top_k": 2, "num_nodes": 4}}]},
            r"entries\[0\]: tree: .*num_nodes",
        ),
        (
            {"entries": [{"batch": 1, "temperature": 0.0, "method": "eagle3", "weights": "x",
                          "tree": {"depth": 1, "top_k": 1, "num_nodes": 1, "verification": "block"}}]},
            "verification must be deterministic in a profile, got 'block'",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(path, change, message):
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message) as caught:
        load_profile(path, tiny_target())
    assert str(path) in str(caught.value)


def test_another_machine_gives_a_warning(path, loads, monkeypatch):
    with pytest.warns(UserWarning, match=r"tuned on 'here', and this is '.*': the text is the same"):
        load_profile(path, tiny_target())
    monkeypatch.setattr(profiles, "machine", lambda: "here")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_profile(path, tiny_target())


def test_what_is_no_profile_is_refused(path, tmp_path):
    target, missing = tiny_target(), tmp_path / "none.yaml"
    gone = dataclasses.replace(HEAD, weights=str(tmp_path / "nothere"))
    (tmp_path / "gone.yaml").write_text(content(Entry(1, 1.0), gone).to_yaml())
    for call, message in (
        (lambda: eagle_jax.generate(target, "auto", [[1]]), r"profile must be a file of python -m infer\.tune"),
        (lambda: eagle_jax.stream(target, "auto", [1], profile=3), r'with drafter="auto", got 3'),
        (lambda: eagle_jax.generate(target, None, [[1]], profile=path), 'must be None unless drafter is "auto"'),
        (lambda: eagle_jax.generate(target, "auto", [[1]], profile=missing), r"none\.yaml"),
        (lambda: eagle_jax.generate("target", "auto", [[1]], profile=path), "target must be a Target, got a str"),
        (lambda: load_profile(tmp_path / "gone.yaml", target), r"gone\.yaml, entries\[1\], eagle3: .*nothere"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_tree_that_the_weights_cannot_fill_is_refused(path, loads):
    path.write_text(content(dataclasses.replace(HEAD, tree=TreeConfig(1, 40, 40))).to_yaml())
    with pytest.raises(ConfigError, match="top_k=40 exceeds the head's draft vocabulary of 12 tokens"):
        load_profile(path, tiny_target())


def test_the_bundled_heads_are_found(loads):
    dataclasses.replace(HEAD, weights="bundled").bind(tiny_target(), {})
    assert os.path.isfile(os.path.join(loads[0], "model.safetensors"))
