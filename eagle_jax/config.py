"""Defines the configurations of models, heads and draft trees, as frozen dataclasses without JAX.

A configuration is hashable and comparable, so it can be a static argument of `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args


class ConfigError(ValueError):
    """A configuration is invalid; the message names the field, its rule and the remedy."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv:2104.09864) and its long-context scalings.

    Attributes:
      theta: base of the geometric sequence of frequencies.
      kind: "default", "linear" (positions divided by `factor`), "dynamic" (NTK, base grows with the context), "llama3"
        (frequency-dependent division), "yarn" (arXiv:2309.00071) or "none" (nothing is rotated).
      factor: ratio of the extended to the original context length.
      original_max_position: context length before scaling, in tokens.
      low_freq_factor, high_freq_factor: llama3 only, in wavelengths per original context.
      beta_fast, beta_slow: yarn only, rotations at which interpolation starts and ends.
      attention_factor: yarn only, multiplies cos and sin; None takes the paper's value for `factor`.
      mscale, mscale_all_dim: yarn only, DeepSeek's parameters of the attention factor.
      truncate: yarn only, whether the correction range is rounded to whole dimensions.
    """

    theta: float = 10000.0
    kind: Literal["none", "default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder. Model families differ only in these fields.

    Attributes:
      vocab_size: V. hidden_size: H. intermediate_size: width of the MLP. num_layers: L.
      num_heads: A. num_kv_heads: G, divides A. head_dim: size of one head, independent of H / A.
      rms_norm_eps: added to the mean square, or to the variance, by the norms.
      qkv_bias, out_bias, mlp_bias: whether those projections carry a bias (Qwen2 has only the first).
      qk_norm: RMSNorm over head_dim on queries and keys before RoPE (Qwen3).
      block: "llama" (RMSNorm, gated MLP with SiLU, RoPE) or "gpt2" (LayerNorm with bias, plain MLP with GELU, one
        learned embedding per position, `rope.kind` "none").
      tie_word_embeddings: the lm_head is the transposed embedding.
      max_position: longest context in tokens.
      eos_ids: stop tokens named by the checkpoint. bos_id: first token of a prompt, if the checkpoint names one.
      architecture: the Hugging Face class name, kept for error messages and exports.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    max_position: int = 2048
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    block: Literal["llama", "gpt2"] = "llama"
    tie_word_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    architecture: str = "LlamaForCausalLM"

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        _require_positive(self, *sizes, "max_position")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs of dimensions")
        if self.block not in ("llama", "gpt2"):
            raise ConfigError(f"DecoderConfig.block={self.block!r} must be 'llama' or 'gpt2'")
        if (self.block == "gpt2") != (self.rope.kind == "none"):
            raise ConfigError(f"block={self.block!r} and rope.kind={self.rope.kind!r}: gpt2 alone does not rotate")

    def one_layer(self, **changes: Any) -> DecoderConfig:
        """Returns the configuration of a draft head for this model: one layer of the "llama" kind.

        Args:
          changes: further fields.
        """
        if self.block == "gpt2":
            plain = {"block": "llama", "rope": RopeConfig(), "qkv_bias": False, "out_bias": False, "mlp_bias": False}
            changes = plain | changes
        return dataclasses.replace(self, num_layers=1, **changes)


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """Heads of Medusa-1, Hydra or Hydra++ on a target's last state.

    Attributes:
      kind: "medusa" (heads read the state alone) or "hydra" (and the tokens drafted before).
      hidden_size, vocab_size: the target's. num_heads: levels that can be drafted.
      num_layers: residual blocks per head.
      prefix: Hydra++'s decoder layer between the target and the heads; None without one.
    """

    kind: Literal["medusa", "hydra"]
    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    prefix: DecoderConfig | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("medusa", "hydra"):
            raise ConfigError(f"MedusaConfig.kind={self.kind!r} must be 'medusa' or 'hydra'")
        _require_positive(self, "hidden_size", "vocab_size", "num_heads", "num_layers")
        if self.prefix is not None and self.kind == "medusa":
            raise ConfigError("MedusaConfig.prefix is Hydra++'s layer: kind='medusa' has none")
        if self.prefix is not None and self.prefix.hidden_size != self.hidden_size:
            raise ConfigError(f"MedusaConfig.prefix is {self.prefix.hidden_size} wide, the heads {self.hidden_size}")


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """An EAGLE draft head: one decoder layer that reads the target's features (EAGLE-1/2 and EAGLE-3 layouts).

    Attributes:
      kind: "eagle1" (EAGLE-1 and EAGLE-2 share weights) or "eagle3".
      layer: sizes of the head's one decoder layer; `layer.vocab_size` is the TARGET's V, `layer.num_layers` is 1.
      draft_vocab_size: Vd, rows of the head's own lm_head (eagle3); equals V where the head has no reduced vocabulary.
      target_hidden_size: Ht, hidden size of the target whose features the head reads.
      taps: indices of the target's hidden states that are concatenated, numbered as `hidden_states` of `transformers`
        (0 = embeddings, i = what enters layer i, L = after the final norm). EAGLE-1/2 read (L,).
      own_embedding: the checkpoint carries its own `embed_tokens`, used instead of the target's.
      fc_bias: bias of the fusing projection (EAGLE-1/2).
      fc_norm: an RMSNorm per tap before `fc`. norm_before_fc: one RMSNorm over all taps before `fc`.
      norm_output: the POST-norm state is fed back and read by the lm_head.
      norm_before_residual: the residual branch starts from the normalised feature.
    """

    kind: Literal["eagle1", "eagle3"]
    layer: DecoderConfig
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]
    own_embedding: bool = False
    fc_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("eagle1", "eagle3"):
            raise ConfigError(f"HeadConfig.kind={self.kind!r} must be 'eagle1' or 'eagle3'")
        _require_positive(self, "draft_vocab_size", "target_hidden_size")
        if self.draft_vocab_size > self.layer.vocab_size:
            raise ConfigError(
                f"HeadConfig.draft_vocab_size={self.draft_vocab_size} exceeds the target's vocabulary of "
                f"{self.layer.vocab_size} tokens, of which it must be a subset"
            )
        if not self.taps or min(self.taps) < 0:
            raise ConfigError(
                f"HeadConfig.taps={self.taps} must name at least one hidden state of the target, from 0 up"
            )


Verification = Literal["deterministic", "rejection", "block", "traversal"]
"""Acceptance rules."""


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    """Shape of the draft tree. All trees are static in shape: `num_nodes` drafted nodes, the root not counted.

    A dynamic tree (EAGLE-2, arXiv:2406.16858, section 4) is the default; `TreeConfig.chain(n)` and
    `TreeConfig.static(parents)` (EAGLE, Medusa) give the other two.

    Attributes:
      depth: D, drafted levels = sequential head passes per cycle.
      top_k: K, children per node and width of the frontier.
      num_nodes: N, drafted nodes kept after the rerank.
      parents: a static tree: for every drafted node the index of its parent among the drafted nodes, -1 for the root.
        Siblings take the head's candidates in order of rank. `depth`, `top_k` and `num_nodes` then follow from it.
      rank_by: "value" (cumulative log-probability, EAGLE-2) or "confidence" (the node's own): what the frontier is
        chosen by. The rerank always goes by value.
      rerank: keep the best `num_nodes` of all recorded candidates (EAGLE-2); False keeps the frontiers themselves.
      sampled_ranking: what candidates are ranked by at temperature > 0 (at 0 all three are the same).
        "draw": how likely each is the very token that the target will draw, whose noise the key tells beforehand; the
        most is accepted. "law": the head's law at the sampling temperature. "untempered": its law at temperature 1, as
        in the papers' code. The text is the same with all three.
      top_p: a node of a ranked tree gets children until their probability reaches this, `top_k` at most. It is that
        by which they are ranked: with "draw" above temperature 0 the probability to be drawn, the noise known.
      noise_scale: with "draw", scale of the Gumbel noise by which the drafter's log-probabilities are assumed to differ
        from the target's. 0.7 was found on the bundled heads (`infer.acceptance` at temperature 1): 0.5 to 1 were
        equally good, small trees best at 1, wide ones at 0.7.
      verification: the acceptance rule. "deterministic" walks a ranked tree with the target's own draws; the text of a
        key is then the same with every drafter. The others are for sampled drafts, whose law they accept by, and at
        temperature 0 do the same as the first: "rejection" (standard speculative sampling; siblings without
        replacement), "block" (chains) and "traversal" (static trees), both of which accept longer. See `rejection`.

    Raises:
      ConfigError: naming the bound that is broken.
    """

    depth: int = 6
    top_k: int = 10
    num_nodes: int = 59
    parents: tuple[int, ...] | None = None
    rank_by: Literal["value", "confidence"] = "value"
    rerank: bool = True
    sampled_ranking: Literal["draw", "law", "untempered"] = "draw"
    top_p: float = 1.0
    verification: Verification = "deterministic"
    noise_scale: float = 0.7

    def __post_init__(self) -> None:
        self._check_rules()
        if self.rank_by not in ("value", "confidence"):
            raise ConfigError(f"TreeConfig.rank_by={self.rank_by!r} must be 'value' or 'confidence'")
        if self.sampled_ranking not in ("draw", "law", "untempered"):
            raise ConfigError(
                f"TreeConfig.sampled_ranking={self.sampled_ranking!r} must be 'draw', 'law' or 'untempered'"
            )
        if isinstance(self.noise_scale, bool) or not 0.01 <= self.noise_scale <= 100:
            raise ConfigError(f"TreeConfig.noise_scale must lie in 0.01 to 100, got {self.noise_scale!r}")
        if not isinstance(self.rerank, bool):
            raise ConfigError(f"TreeConfig.rerank={self.rerank!r} must be True or False")
        if self.parents is not None:
            if self.rank_by != "value" or not self.rerank:
                raise ConfigError(
                    "TreeConfig.rank_by and rerank choose among the candidates of a dynamic tree; a static tree "
                    "(parents) has nothing to choose: leave them out"
                )
            if not isinstance(self.parents, Iterable):
                raise ConfigError(f"TreeConfig.parents={self.parents!r} must be a list with the parent of every node")
            self._derive_from_parents(tuple(map(_as_int, self.parents)))
            return
        for name in ("depth", "top_k", "num_nodes"):
            object.__setattr__(self, name, _as_int(getattr(self, name)))
        _require_positive(self, "depth", "top_k", "num_nodes")
        if self.num_nodes > self.pool_size:
            formula = "top_k + (depth - 1) * top_k**2" if self.rerank else "top_k * depth (rerank is off)"
            raise ConfigError(
                f"TreeConfig.num_nodes={self.num_nodes} exceeds the {self.pool_size} candidates that "
                f"depth={self.depth} and top_k={self.top_k} produce ({formula}); lower num_nodes or raise the others"
            )
        if self.num_nodes < self.depth:
            raise ConfigError(
                f"TreeConfig.num_nodes={self.num_nodes} is below depth={self.depth}: a node of the last level could "
                f"never be kept with its ancestors; lower depth to at most {self.num_nodes} or raise num_nodes"
            )

    def _check_rules(self) -> None:
        rules = get_args(Verification)
        if self.verification not in rules:
            raise ConfigError(f"TreeConfig.verification={self.verification!r} must be one of {', '.join(rules)}")
        if isinstance(self.top_p, bool) or not isinstance(self.top_p, numbers.Real) or not 0 < self.top_p <= 1:
            raise ConfigError(f"TreeConfig.top_p={self.top_p!r} must lie in (0, 1]; 1 gives every node top_k children")
        if self.verification == "deterministic":
            return
        if self.parents is None and self.top_k != 1:
            raise ConfigError(
                f"TreeConfig.verification={self.verification!r} is for drafts whose shape does not depend on the "
                "tokens drawn: use it with TreeConfig.chain or TreeConfig.static, or take 'deterministic'"
            )
        if self.verification == "block" and self.parents is not None and max(sibling_ranks(self.parents)) > 0:
            raise ConfigError("TreeConfig.verification='block' is for chains: for a tree, take 'traversal'")
        if self.top_p != 1:
            raise ConfigError(
                f"TreeConfig.top_p={self.top_p} chooses among ranked children, and verification="
                f"{self.verification!r} wants sampled ones: leave one of them out"
            )

    def _derive_from_parents(self, parents: tuple[int, ...]) -> None:
        derived = {
            "depth": max(_static_depths(parents)),
            "top_k": max(sibling_ranks(parents)) + 1,
            "num_nodes": len(parents),
        }
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, value in derived.items():
            given = getattr(self, name)
            if given not in (value, defaults[name]):
                raise ConfigError(
                    f"TreeConfig.{name}={given} contradicts parents, which give {name}={value}; leave {name} out"
                )
            object.__setattr__(self, name, value)
        object.__setattr__(self, "parents", parents)

    @property
    def pool_size(self) -> int:
        """Candidates recorded before the rerank (or frontier nodes, where there is no rerank)."""
        if not self.rerank:
            return self.top_k * self.depth
        return self.top_k + (self.depth - 1) * self.top_k**2

    @classmethod
    def chain(cls, length: int, verification: Verification = "deterministic") -> TreeConfig:
        """A chain of `length` tokens: a tree whose every node has one child."""
        return cls(depth=length, top_k=1, num_nodes=length, verification=verification)

    @classmethod
    def static(
        cls, parents: Sequence[int], verification: Verification = "deterministic", *, top_p: float = 1.0
    ) -> TreeConfig:
        """A tree of fixed shape, given by its `parents` list; that of EAGLE-1 is `EAGLE1_PARENTS`."""
        given: Any = () if parents is None else parents  # None would be a dynamic tree; the checks make a tuple of it
        return cls(parents=given, verification=verification, top_p=top_p)


EAGLE1_PARENTS = (*[-1] * 4, 0, 0, 0, 1, 1, 2, 2, 3, 4, 4, 4, 5, 5, 6, 6, 7, 12, 12, 12, 20, 20)
"""The static tree of EAGLE-1 (arXiv:2401.15077): 25 drafted nodes in levels of 4, 8, 8, 3 and 2."""


def _require_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{type(config).__name__}.{name}={value!r} must be an integer of at least 1")


def _as_int(value: Any) -> Any:
    """Converts NumPy's integers to Python's; returns other values unchanged, for the checks."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def _static_depths(parents: Sequence[int]) -> list[int]:
    if not parents:
        raise ConfigError("TreeConfig.parents is empty: a static tree needs at least one drafted node")
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if isinstance(parent, Sequence) and not isinstance(parent, str):
            raise ConfigError(
                f"TreeConfig.parents[{node}]={parent!r} is a path of ranks: turn such a list into parents with "
                "eagle_jax.shapes.parents_of_paths"
            )
        if not isinstance(parent, int) or isinstance(parent, bool) or not -1 <= parent < node:
            earlier = f" or the index of an earlier node, 0 to {node - 1}" if node else ""
            raise ConfigError(
                f"TreeConfig.parents[{node}]={parent!r} must be -1 (the root){earlier}: parents precede children"
            )
        depths.append(1 if parent == -1 else depths[parent] + 1)
    return depths


def static_depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Depth of every drafted node of a static tree; children of the root have depth 1."""
    return tuple(_static_depths(parents))


def sibling_ranks(parents: Sequence[int]) -> tuple[int, ...]:
    """Rank of every node among the children of its parent, in order of appearance from 0."""
    seen: dict[int, int] = {}
    ranks = []
    for parent in parents:
        ranks.append(seen.get(parent, 0))
        seen[parent] = ranks[-1] + 1
    return tuple(ranks)
