"""Heads that a layout cannot hold, and directories that must not be overwritten: nothing is written."""

from __future__ import annotations

import dataclasses
import resource

import jax.numpy as jnp
import pytest

from eagle_jax.checkpoints import (
    CheckpointError,
    export_head,
    load_head_checkpoint,
)
from tests.checkpoints.random_exports import (
    EAGLE1,
    EMBEDDING,
    HEAD,
    LAYER,
    VARIANTS,
    assert_same,
    export,
    random_params,
    refusal,
)
from tests.checkpoints.random_heads import TARGET


class TestRefused:
    @pytest.mark.parametrize(
        ("layout", "change", "part"),
        [
            ("sglang", {"norm_before_residual": True}, "norm_before_residual"),
            ("sglang", {"norm_before_fc": True}, "norm_before_fc"),
            ("sglang", {"own_embedding": True}, "an embedding that is not the target's"),
            ("sglang", {"layer": dataclasses.replace(LAYER, qk_norm=True)}, "norms of queries and keys"),
            ("sglang", {"layer": dataclasses.replace(LAYER, mlp_bias=True)}, "biases of the layer"),
            ("sglang", {"fc_bias": True}, "a bias of fc"),
            ("speculators", {"fc_bias": True}, "a bias of fc"),
            ("speculators", {"fc_norm": True, "norm_before_fc": True}, "norm_before_fc together with fc_norm"),
            ("speculators", {"layer": dataclasses.replace(LAYER, qkv_bias=True)}, "only some attention projections"),
            (
                "speculators",
                {"layer": dataclasses.replace(LAYER, qk_norm=True, mlp_bias=True)},
                "MLP biases beside norms of queries and keys",
            ),
            ("sglang", {"taps": (4, 2, 6)}, "taps (4, 2, 6) (they must ascend, from 1 to 8)"),
            ("sglang", {"taps": (0, 2, 6)}, "taps (0, 2, 6)"),
            ("speculators", {"taps": (2, 4, 9)}, "taps (2, 4, 9)"),  # 9 is behind the final norm
        ],
    )
    def test_what_has_no_place_in_a_layout(self, layout, change, part, tmp_path):
        message = refusal(dataclasses.replace(HEAD, **change), layout, tmp_path)
        assert message.startswith(f"the {layout} layout cannot hold ")
        assert part in message

    @pytest.mark.parametrize("layout", ["sglang", "speculators"])
    def test_an_eagle1_head_elsewhere_than_in_the_official_layout(self, layout, tmp_path):
        message = refusal(EAGLE1, layout, tmp_path)
        assert message == f"layout must be 'official' for an EAGLE-1/2 head, got {layout!r}."

    def test_no_embedding_where_there_must_be_one(self, tmp_path):
        message = refusal(EAGLE1, "official", tmp_path)
        assert message == "an EAGLE-1/2 head in the official layout carries its target's embedding. Pass embedding=."
        message = refusal(HEAD, "speculators", tmp_path, embedding=None)
        assert message == "an EAGLE-3 head in the speculators layout carries its target's embedding. Pass embedding=."

    def test_a_vocabulary_that_is_only_permuted(self, tmp_path):
        config = VARIANTS["full vocabulary"]
        params = random_params(config) | {"d2t": jnp.asarray([1, -1] + [0] * 51, jnp.int32)}
        with pytest.raises(CheckpointError, match="a d2t that permutes the whole vocabulary"):
            export_head(config, params, TARGET, tmp_path, "speculators", verifier="a/b", embedding=EMBEDDING)
        export_head(config, params, TARGET, tmp_path, "official", "float32")
        assert_same(load_head_checkpoint(tmp_path, TARGET)[1], params)

    def test_speculators_without_a_verifier(self, tmp_path):
        assert "verifier must be the hub id or path" in refusal(HEAD, "speculators", tmp_path, verifier="")

    def test_no_speculative_tokens(self, tmp_path):
        message = refusal(HEAD, "speculators", tmp_path, speculative_tokens=0)
        assert message == "speculative_tokens must be at least 1, got 0."


class TestOut:
    def test_a_directory_that_is_not_empty(self, tmp_path):
        (tmp_path / "README.md").write_text("mine")
        with pytest.raises(CheckpointError, match=r"exists and is not an empty directory.*--overwrite"):
            export(HEAD, tmp_path, "sglang")
        assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
        export(HEAD, tmp_path, "sglang", overwrite=True)
        export(HEAD, tmp_path, "speculators", overwrite=True)
        assert {path.name for path in tmp_path.iterdir()} == {"README.md", "config.json", "model.safetensors"}
        assert (tmp_path / "README.md").read_text() == "mine"
        assert load_head_checkpoint(tmp_path, TARGET, embedding=jnp.asarray(EMBEDDING))[0] == HEAD

    def test_a_file(self, tmp_path):
        (tmp_path / "head").write_text("mine")
        for overwrite in (False, True):
            with pytest.raises(CheckpointError, match="head"):
                export(HEAD, tmp_path / "head", "sglang", overwrite=overwrite)
        assert (tmp_path / "head").read_text() == "mine"

    def test_a_full_disk_leaves_what_was_there(self, tmp_path):
        export(HEAD, tmp_path / "head", "sglang")
        before = {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()}
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # config.json fits, the weights do not
        try:
            with pytest.raises(CheckpointError, match=r"could not be written in .*: make room and save again"):
                export(HEAD, tmp_path / "head", "official", overwrite=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()} == before
        assert [path.name for path in tmp_path.iterdir()] == ["head"]
