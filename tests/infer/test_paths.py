"""Paths that programs are given: what is wrong with one names its option, and what is taken for granted is said."""

from __future__ import annotations

import shutil

import pytest

from eagle_jax.assets import bundled
from eagle_jax.checkpoints import CheckpointError
from infer import cycle
from infer.common.labels import Label
from infer.common.methods import OPTIONS, Loader, Sources, best_static, load_pair


def test_a_path_that_is_not_there_names_its_option(tmp_path):
    with pytest.raises(CheckpointError, match=r"^--target /nope: no such directory: /nope"):
        load_pair(Sources(target="/nope"))
    target, _ = load_pair(Sources())
    for method, field in OPTIONS.items():
        option = f"--{field.replace('_', '-')}"
        with pytest.raises(CheckpointError, match=f"^{option} /nope: no such directory: /nope"):
            Loader(target, Sources(**{field: "/nope"}))(method)
    with pytest.raises(ValueError, match=r"^--positions /nope: No such file or directory$"):
        best_static(Label.parse("medusa@best31"), "/nope")


def test_what_a_path_holds_instead_names_the_option_too():
    target, _ = load_pair(Sources())
    with pytest.raises(CheckpointError, match=r"^--eagle3 [^ ]*medusa holds Medusa heads: load them with load_medusa"):
        Loader(target, Sources(eagle3=str(bundled("medusa"))))("eagle3")


def test_profiling_names_its_options(tmp_path, monkeypatch):
    monkeypatch.setattr(cycle, "use_compilation_cache", lambda: None)
    with pytest.raises(CheckpointError, match=r"^--target /nope: no such directory"):
        cycle.main(cycle.Args(target="/nope", head="/nope"))
    with pytest.raises(CheckpointError, match=r"^--head /nope: no such directory"):
        cycle.main(cycle.Args(target=str(bundled("target")), head="/nope"))


def test_a_draft_model_without_tokenizer_is_taken_but_not_silently(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(bundled("small") / name, tmp_path)
    target, _ = load_pair(Sources())
    message = f"draft model {tmp_path} has no tokenizer files: assuming the target's"
    with pytest.warns(UserWarning, match="tokenizer files") as told:
        Loader(target, Sources(draft_model=str(tmp_path)))("sps")
    assert [str(one.message) for one in told] == [message]
