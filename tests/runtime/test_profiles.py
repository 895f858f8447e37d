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
from eagle_jax.runtime.profile import Entry, Profile, ProfileFile, fingerprint, load_profile, read_profile
from eagle_jax.runtime.target import Target
from tests.models import random_prompts, tiny_head, tiny_target

TREE = TreeConfig(2, 2, 5)
HEAD = Entry(1, 0.0, "eagle3", "some/head", TREE, predicted=1.9, measured=2.0, worst=1.5)
ENTRIES = (
    HEAD,
    Entry(1, 1.0, "eagle3", "some/head", TreeConfig.chain(2)),
    Entry(4, 0.0, "pld", ngram=2, length=3),
    Entry(4, 1.0),
)


@pytest.fixture
def loads(monkeypatch):
    """Counts how often weights are read; they are a tiny head's."""
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
    assert read_profile(path) == content(*ENTRIES)
    text = path.read_text()
    assert text.startswith("# a comment\nschema: eagle_jax.profile/1\n")
    assert text.count("\n") == 7 + len(ENTRIES)  # an entry is a line
    static = Entry(1, 0.0, "medusa", "x", TreeConfig.static([-1, -1, 0]))
    lookup = Entry(1, 2.0, "pld", ngram=2, length=3, shortest=2, latest=True)
    path.write_text(content(static, Entry(1, 1.0, "lookahead", ngram=3, window=2, guesses=2), lookup).to_yaml())
    assert read_profile(path).entries[::2] == (static, lookup)


def test_all_settings_of_prompt_lookup_are_bound():
    target, settings = tiny_target(), {"ngram": 2, "length": 3, "shortest": 2, "latest": True}
    bound = Entry(1, 0.0, "pld", **settings).bind(target, {})
    assert bound.drafter is eagle_jax.prompt_lookup(target, **settings).drafter
    assert bound.drafter is not Entry(1, 0.0, "pld", ngram=2, length=3).bind(target, {}).drafter
    with pytest.raises(ConfigError, match="method lookahead takes no latest"):
        Entry(1, 0.0, "lookahead", ngram=3, window=2, guesses=2, latest=True)


@pytest.mark.parametrize(
    ("batch", "temperature", "entry"),
    [
        (1, 0.0, 0),
        (1, 0.3, 1),  # drafts are worth less as the temperature grows: the next one measured above
        (1, 1.0, 1),
        (2, 0.0, 2),
        (4, 0.5, 3),
        (1, 1.5, None),  # beyond what was measured: plain decoding
        (5, 0.0, None),
    ],
)
def test_the_entry_is_chosen_by_batch_and_temperature(batch, temperature, entry):
    found = content(*ENTRIES).find(batch, temperature, 1000)
    assert found == (None if entry is None else ENTRIES[entry])


@pytest.mark.parametrize(
    ("temperature", "prompt", "entry"),
    [(0.0, 1, 0), (0.0, 100, 0), (0.0, 101, 1), (0.0, 501, 2), (1.0, 100, 3), (1.0, 101, None), (0.5, 50, 3)],
)
def test_of_these_the_one_for_the_shortest_prompts_that_fit(temperature, prompt, entry):
    lookup = {"ngram": 2, "length": 3}
    entries = (
        Entry(1, 0.0, "pld", prompt=100, **lookup),
        Entry(1, 0.0, "lookahead", prompt=500, ngram=3, window=2, guesses=2),
        Entry(1, 0.0),
        Entry(1, 1.0, "pld", prompt=100, **lookup),
    )
    found = content(*reversed(entries)).find(1, temperature, prompt)
    assert found == (None if entry is None else entries[entry])


def test_a_call_follows_its_longest_prompt(path, loads):
    target, chain = tiny_target(), TreeConfig.chain(2)
    entries = (Entry(4, 0.0, "eagle3", "some/head", chain, prompt=6), Entry(4, 0.0, "pld", ngram=2, length=3))
    path.write_text(content(*entries).to_yaml())
    assert read_profile(path).entries == entries
    for lengths, depth in (([5, 6], 2), ([5, 7], 3)):
        prompts = random_prompts(lengths, 12)
        auto = eagle_jax.generate(target, "auto", prompts, profile=path, max_new_tokens=8)
        assert auto.accepted.shape[1] == depth + 1
        assert auto.tokens == eagle_jax.generate(target, None, prompts, max_new_tokens=8).tokens


def test_a_setting_that_lacks_a_temperature_falls_to_a_larger_batch():
    file = content(Entry(1, 0.0), Entry(4, 1.0, "pld", ngram=2, length=3))
    assert file.find(1, 0.7, 9) == file.entries[1]


def test_auto_is_what_the_profile_chooses(path, loads):
    profile = load_profile(path, tiny_target())
    assert loads == ["some/head"]  # once for both trees
    assert profile.choose(1, 0.0, 9).tree == TREE
    assert profile.choose(1, 0.7, 9).tree == TreeConfig.chain(2)
    assert profile.choose(3, 0.0, 9).drafter is eagle_jax.prompt_lookup(tiny_target(), ngram=2, length=3).drafter
    assert profile.choose(4, 1.0, 9) is None
    assert profile.choose(64, 0.0, 9) is None


@pytest.mark.parametrize(("rows", "temperature"), [(1, 0.0), (1, 1.0), (4, 0.0)])
def test_auto_writes_the_text_of_plain_decoding(path, loads, rows, temperature):
    target, prompts = tiny_target(), random_prompts([5, 7, 4, 6][:rows], 12)
    options = {"max_new_tokens": 12, "temperature": temperature, "key": 2}
    auto = eagle_jax.generate(target, "auto", prompts, profile=path, **options)
    assert auto.tokens == eagle_jax.generate(target, None, prompts, **options).tokens
    assert auto.accepted.shape[1] == content(*ENTRIES).find(rows, temperature, 7).bind(target, {}).drafter.depth + 1
    if rows == 1:
        chunks = eagle_jax.stream(target, "auto", prompts[0], profile=path, **options)
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
    with pytest.raises(ConfigError, match=r"tuned for the target 'target' \(fingerprint .*\): tune this one with"):
        load_profile(path, other)
    half = Target.from_params(other.config, jax.tree.map(lambda leaf: leaf.astype("bfloat16"), other.params))
    with pytest.raises(ConfigError, match="in float32, and this target is in bfloat16: load it with dtype='float32'"):
        load_profile(path, half)
    bound = load_profile(path, tiny_target())
    wider = tiny_target(vocab=13)
    with pytest.raises(ValueError, match="profile was loaded for another target"):
        eagle_jax.generate(wider, "auto", [[1]], profile=bound)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "eagle_jax.profile/2", "new": 1}, "has schema 'eagle_jax.profile/2', and this version reads"),
        ({"machin": "x"}, "unknown key 'machin'. Did you mean 'machine'"),
        ({"entries": []}, "entries must hold at least one entry"),
        ({"entries": [{"batch": 1}]}, r"entries\[0\]: missing temperature"),
        ({"entries": [{"batch": 0, "temperature": 0.0}]}, "batch must be at least 1 .*, got 0"),
        ({"entries": [{"batch": 1, "temperature": 0.0, "prompt": 0}]}, "prompt must be at least 1 token, got 0"),
        ({"entries": [{"batch": 1, "temperature": 0.0, "prompt": 9}] * 2}, "for prompts to 9 tokens is given twice"),
        ({"entries": [{"batch": 1, "temperature": 0.0, "method": "eagle4"}]}, "method='eagle4' must be one of"),
        ({"entries": [{"batch": 1, "temperature": 0.0, "method": "eagle2"}]}, "method eagle2 needs weights"),
        ({"entries": [{"batch": 1, "temperature": 0.0, "ngram": 2}]}, "method vanilla takes no ngram"),
        ({"entries": [{"batch": 1, "temperature": 0.0}, {"batch": 1, "temperature": 0}]}, "given twice"),
        (
            {"entries": [{"batch": 1, "temperature": 0.0, "method": "eagle3", "weights": "x",
                          "tree": {"depth": 9, "top_k": 2, "num_nodes": 4}}]},
            r"entries\[0\]: tree: TreeConfig.num_nodes=4 is below depth=9",
        ),
        (
            {"entries": [{"batch": 1, "temperature": 0.0, "method": "eagle3", "weights": "x",
                          "tree": {"depth": 1, "top_k": 1, "num_nodes": 1, "verification": "block"}}]},
            "makes the text of a key depend on the drafts",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(path, change, message):
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


def test_another_machine_is_told(path, loads, monkeypatch):
    with pytest.warns(UserWarning, match=r"tuned on 'here', and this is '.*': the text is the same"):
        load_profile(path, tiny_target())
    monkeypatch.setattr(profiles, "machine", lambda: "here")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_profile(path, tiny_target())


def test_what_is_no_profile_is_refused(path, tmp_path):
    target = tiny_target()
    with pytest.raises(ValueError, match=r'drafter="auto" needs profile=.*python -m infer\.tune'):
        eagle_jax.generate(target, "auto", [[1]])
    with pytest.raises(ValueError, match=r'drafter="auto" needs profile=.*found int'):
        eagle_jax.stream(target, "auto", [1], profile=3)
    with pytest.raises(ValueError, match='profile must be None unless drafter is "auto"'):
        eagle_jax.generate(target, None, [[1]], profile=path)
    with pytest.raises(ConfigError, match="is a directory: give the YAML file"):
        eagle_jax.load_profile(tmp_path, tiny_target())
    with pytest.raises(ConfigError, match=r"no such profile: python -m infer\.tune"):
        eagle_jax.generate(target, "auto", [[1]], profile=tmp_path / "none.yaml")
    path.write_text("schema: [")
    with pytest.raises(ConfigError, match=r"profile\.yaml: while parsing"):
        load_profile(path, target)
    with pytest.raises(ValueError, match="target must be a Target, got a str"):
        eagle_jax.generate("target", "auto", [[1]], profile=path)


def test_a_tree_that_the_weights_cannot_fill_is_refused(path, loads):
    path.write_text(content(dataclasses.replace(HEAD, tree=TreeConfig(1, 40, 40))).to_yaml())
    with pytest.raises(ConfigError, match="top_k=40 exceeds the head's draft vocabulary of 12 tokens"):
        load_profile(path, tiny_target())


def test_the_bundled_heads_are_found(monkeypatch):
    found = []
    monkeypatch.setattr(profiles, "load_drafter", lambda path, target: found.append(path) or tiny_head("eagle3", TREE))
    dataclasses.replace(HEAD, weights="bundled").bind(tiny_target(), {})
    assert os.path.isfile(os.path.join(found[0], "model.safetensors"))
    assert isinstance(Profile(content(HEAD), (None,), tiny_target().fn).choose(1, 0.0, 1), type(None))


def test_weights_that_are_missing_are_named_by_their_entry(tmp_path):
    target = tiny_target()
    entries = (Entry(1, 0.0), Entry(1, 1.0, "eagle3", str(tmp_path / "nothere"), TREE))
    path = tmp_path / "p.yaml"
    path.write_text(content(*entries).to_yaml())
    with pytest.raises(ValueError, match=r"p\.yaml, entries\[1\], eagle3: .*nothere"):
        load_profile(path, target)
    path.write_bytes(b"\x80")
    with pytest.raises(ValueError, match=r"p\.yaml is no text: give the YAML file"):
        load_profile(path, target)
