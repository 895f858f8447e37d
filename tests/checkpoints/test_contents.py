"""A folder of another kind is refused by what it holds, with the function that loads it."""

from __future__ import annotations

import pytest

import eagle_jax
from eagle_jax.assets import bundled
from eagle_jax.checkpoints import CheckpointError
from eagle_jax.checkpoints.contents import held
from infer.methods import Loader, Sources, load_pair

HOLDS = {
    "target": "a model",
    "small": "a model",
    "eagle2": "an EAGLE head",
    "eagle3": "an EAGLE head",
    "medusa": "Medusa heads",
    "hydra": "Hydra heads",
}


@pytest.fixture(scope="module")
def target() -> eagle_jax.Target:
    return eagle_jax.load_demo()[0]


def loaders(target: eagle_jax.Target) -> dict:
    return {
        "a model": eagle_jax.load_target,
        "an EAGLE head": lambda path: eagle_jax.load_drafter(path, target),
        "Medusa heads": lambda path: eagle_jax.load_medusa(path, target),
        "draft model": lambda path: eagle_jax.load_draft_model(path, target),
    }


def test_what_a_folder_holds(golden, tmp_path):
    assert {name: held(bundled(name)) for name in HOLDS} == HOLDS
    assert {name: held(golden / name) for name in ("target", "eagle3")} == {
        "target": "a model", "eagle3": "an EAGLE head"
    }  # fmt: skip
    assert held(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    assert held(tmp_path) is None


@pytest.mark.parametrize(
    ("wanted", "name", "remedy"),
    [
        ("a model", "eagle3", r"and not a model: it is for load_drafter \(--eagle2 or --eagle3\)"),
        ("a model", "eagle2", r"and not a model: it is for load_drafter"),
        ("a model", "medusa", r"and not a model: it is for load_medusa \(--medusa\)"),
        ("draft model", "eagle2", r"and not a model: it is for load_drafter"),
        ("draft model", "hydra", r"and not a model: it is for load_medusa \(--hydra\)"),
        ("an EAGLE head", "hydra", r"and not an EAGLE head: it is for load_medusa"),
        ("an EAGLE head", "medusa", r"and not an EAGLE head: it is for load_medusa"),
        ("an EAGLE head", "small", r"and not an EAGLE head: it is for load_target, or load_draft_model"),
        ("Medusa heads", "eagle3", r"and not Medusa heads: it is for load_drafter"),
        ("Medusa heads", "target", r"and not Medusa heads: it is for load_target"),
    ],
)
def test_another_kind_is_named(target, wanted, name, remedy):
    with pytest.raises(CheckpointError, match=rf"{name} holds {HOLDS[name]} {remedy}"):
        loaders(target)[wanted](bundled(name))


def test_a_broken_folder_keeps_its_own_error(target, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for load in loaders(target).values():
        with pytest.raises(CheckpointError) as error:
            load(tmp_path)
        assert " holds " not in str(error.value)


@pytest.mark.parametrize(
    ("label", "option"),
    [("eagle3", "eagle3"), ("eagle1", "eagle1"), ("medusa", "medusa"), ("sps", "draft-model")],
)
def test_programs_name_the_option(target, label, option):
    load = Loader(target, Sources(**{option.replace("-", "_"): "/nowhere/at/all"}))
    with pytest.raises(CheckpointError, match=f"--{option} /nowhere/at/all: no such directory: /nowhere/at/all"):
        load(label)
    with pytest.raises(CheckpointError, match="--target /nowhere/at/all: no such directory"):
        load_pair(Sources(target="/nowhere/at/all"))


def test_a_method_without_a_tree_says_so(target):
    for method in (eagle_jax.prompt_lookup(target), eagle_jax.lookahead(target)):
        with pytest.raises(
            eagle_jax.ConfigError, match=rf"{method.name} takes no tree: .*prompt_lookup\(target, length"
        ):
            method.with_tree(eagle_jax.TreeConfig.chain(2))
