"""Defines the configurations of models, heads and draft trees, as frozen dataclasses without JAX.

A configuration is hashable and comparable, so it can be a static argument of `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, Literal

from eagle_jax.checks import ConfigError, check_fields, check_integer
from eagle_jax.rotary import RopeConfig


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in the place of an MLP: a router chooses `top_k` of `num_experts` for every token.

    Attributes:
      num_experts: E. top_k: experts per token. intermediate_size: width of one expert.
      normalise: the weights of the chosen experts are a softmax over these (`norm_topk_prob`); False keeps their
        probabilities of the softmax over all experts.
      dense_layers: layers that have an MLP of `DecoderConfig.intermediate_size` instead.
      bias: router and experts have biases (gpt-oss).
      limit: largest gate, and largest magnitude of the up projection, for gpt-oss's
        `gate * sigmoid(alpha * gate) * (up + 1)`; None is `silu(gate) * up`.
      alpha: see `limit`.

    Raises:
      ConfigError: naming the field and its rule.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalise: bool = True
    dense_layers: tuple[int, ...] = ()
    bias: bool = False
    limit: float | None = None
    alpha: float = 1.702

    def __post_init__(self) -> None:
        check_fields(self, "num_experts", "top_k", "intermediate_size")
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"ExpertsConfig.top_k must be at most num_experts={self.num_experts}, got {self.top_k}. Lower it."
            )


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder. Model families differ only in these fields.

    Attributes:
      vocab_size: V. hidden_size: H. intermediate_size: width of the MLP. num_layers: L.
      num_heads: A. num_kv_heads: G, divides A. head_dim: size of one head, independent of H / A.
      rms_norm_eps: added to the mean square (RMSNorm) or variance (LayerNorm).
      max_position: longest context in tokens.
      qkv_bias, out_bias, mlp_bias: biases of those projections (Qwen2 has only the first).
      qk_norm: RMSNorm over head_dim on queries and keys before RoPE (Qwen3).
      windows: per layer, how many tokens a token sees, itself included (`sliding_window` of `transformers`); 0 is all.
        () is 0 in every layer.
      sinks: every head has a score that takes part in the softmax of its attention and adds nothing (gpt-oss).
      wide_norms: norms multiply by their weights in float32, not in the dtype of the activations (gpt-oss).
      experts: mixture of experts in the place of the MLP (Qwen3-MoE, gpt-oss); None without one.
      local_rope: rotary embedding of the layers with a window; None is `rope`.
      query_scalar: scores are divided by its square root; None is head_dim.
      nope_layers: layers without rotary embedding, ascending (SmolLM3: every fourth; arXiv:2501.18795).
      block: "llama" (RMSNorm, gated MLP with SiLU, RoPE), "gpt2" (LayerNorm, plain MLP with GELU, one learned embedding
        per position, `rope.kind` "none") or "gemma3" (RMSNorm by 1 + weight, also after attention and MLP, gated MLP
        with tanh GELU, embeddings times sqrt(H)).
      tie_word_embeddings: the lm_head is the transposed embedding.
      eos_ids: stop tokens of the checkpoint. bos_id: first token of a prompt, if the checkpoint has one.
      architecture: Hugging Face class name, for error messages and exports.

    Raises:
      ConfigError: naming the field and its rule.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()  # noqa: RUF009  it is frozen
    max_position: int = 2048
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    sinks: bool = False
    wide_norms: bool = False
    experts: ExpertsConfig | None = None
    local_rope: RopeConfig | None = None
    query_scalar: int | None = None
    nope_layers: tuple[int, ...] = ()
    block: Literal["llama", "gpt2", "gemma3"] = "llama"
    tie_word_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    architecture: str = "LlamaForCausalLM"

    def __post_init__(self) -> None:
        check_fields(
            self, "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
            "head_dim", "max_position",
        )  # fmt: skip
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"DecoderConfig.num_heads must be a multiple of num_kv_heads={self.num_kv_heads}, got "
                f"{self.num_heads}. Change one (num_attention_heads or num_key_value_heads of a config.json)."
            )
        rope, rotated = self.rope, self.rope.rotated(self.head_dim)
        for name, size in (("head_dim", self.head_dim), (f"head_dim * rope.partial ({rope.partial:g})", rotated)):
            if size % 2 or size < 2:
                raise ConfigError(f"{name} must be even, got {size}. RoPE rotates pairs of dimensions.")
        if rope.kind == "longrope" and {len(rope.short_factor), len(rope.long_factor)} != {rotated // 2}:
            raise ConfigError(
                f"RopeConfig.short_factor and long_factor must hold {rotated // 2} numbers each, one per rotated pair, "
                f"got {len(rope.short_factor)} and {len(rope.long_factor)}. Correct them."
            )
        if not set(self.nope_layers) <= set(range(self.num_layers)):
            raise ConfigError(
                f"DecoderConfig.nope_layers must be layers 0 to {self.num_layers - 1}, got {self.nope_layers}. "
                "Leave others out."
            )
        if len(self.windows) not in (0, self.num_layers):
            raise ConfigError(
                f"DecoderConfig.windows must have a window for each of the {self.num_layers} layers, got "
                f"{len(self.windows)}. Give 0 for a layer that sees all tokens."
            )
        if self.query_scalar is not None:
            check_fields(self, "query_scalar")
        for index, window in enumerate(self.windows):
            check_integer(f"DecoderConfig.windows[{index}]", window, least=0)

    def one_layer(self, **changes: Any) -> DecoderConfig:
        """Returns the config of one "llama" layer for a draft head of this model, with `changes` to fields.

        It has what engines read in a head: no window, no experts, no partial rotation, no factors of longrope, no layer
        without RoPE.
        """
        plain: dict[str, Any] = {
            "num_layers": 1, "windows": (), "local_rope": None, "query_scalar": None, "sinks": False,
            "wide_norms": False, "experts": None, "nope_layers": (), "block": "llama",
        }  # fmt: skip
        if self.block == "gpt2":
            plain |= {"rope": RopeConfig(), "qkv_bias": False, "out_bias": False, "mlp_bias": False}
        elif self.rope.kind == "longrope" or self.rope.partial != 1:
            plain["rope"] = RopeConfig(self.rope.theta)
        return dataclasses.replace(self, **plain | changes)

    def with_layers(self, num_layers: int) -> DecoderConfig:
        """Returns the config with only the first `num_layers` layers."""
        nope_layers = tuple(layer for layer in self.nope_layers if layer < num_layers)
        windows = self.windows[:num_layers]
        return dataclasses.replace(self, num_layers=num_layers, windows=windows, nope_layers=nope_layers)


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """Heads of Medusa-1, Hydra or Hydra++.

    Attributes:
      kind: "medusa" (heads read the target's last state) or "hydra" (they also read earlier drafted tokens).
      hidden_size, vocab_size: the target's.
      num_heads: number of levels that can be drafted.
      num_layers: residual blocks per head.
      prefix: decoder layer of Hydra++ between the target and the heads; None without one.

    Raises:
      ConfigError: naming the field and its rule.
    """

    kind: Literal["medusa", "hydra"]
    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    prefix: DecoderConfig | None = None

    def __post_init__(self) -> None:
        check_fields(self, "hidden_size", "vocab_size", "num_heads", "num_layers")
        if self.prefix is not None and any(self.prefix.windows):
            raise ConfigError(
                f"MedusaConfig.prefix must be a layer without a window, got {max(self.prefix.windows)}. Use "
                "DecoderConfig.one_layer."
            )


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """An EAGLE draft head: one decoder layer that reads the target's features (EAGLE-1/2 or EAGLE-3).

    Attributes:
      kind: "eagle1" (EAGLE-1 and EAGLE-2 share weights) or "eagle3".
      layer: sizes of the decoder layer; `layer.vocab_size` is the TARGET's V, `layer.num_layers` is 1.
      draft_vocab_size: Vd, size of the head's lm_head (eagle3); V without a reduced vocabulary.
      target_hidden_size: Ht, hidden size of the target.
      taps: concatenated hidden states of the target, numbered as `hidden_states` of `transformers` (0 = embeddings,
        i = input of layer i, L = after the final norm). EAGLE-1/2 read (L,).
      own_embedding: the head has its own `embed_tokens` instead of the target's.
      fc_bias: bias of the fusing projection (EAGLE-1/2).
      fc_norm: an RMSNorm per tap before `fc`. norm_before_fc: instead, one RMSNorm over all taps.
      norm_output: the next step and the lm_head read the state after the final norm.
      norm_before_residual: the residual branch starts from the normalised feature.

    Raises:
      ConfigError: naming the field and its rule.
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
        check_fields(self, "draft_vocab_size", "target_hidden_size")
        if self.draft_vocab_size > self.layer.vocab_size:
            raise ConfigError(
                f"HeadConfig.draft_vocab_size must be at most the target's vocabulary of {self.layer.vocab_size} "
                f"tokens, got {self.draft_vocab_size}. Lower it."
            )
        if not self.taps or min(self.taps) < 0:
            raise ConfigError(f"HeadConfig.taps must be one or more states, got {self.taps}. Number them from 0.")
        if self.fc_norm and self.norm_before_fc:
            raise ConfigError(
                "HeadConfig.fc_norm and norm_before_fc must not both be on, got two norms before fc. Choose one: "
                "engines apply the two in different orders."
            )


Verification = Literal["deterministic", "rejection", "block", "traversal"]
"""Acceptance rules."""


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    """Static shape of the draft tree: `num_nodes` drafted nodes, the root not counted.

    The default is a dynamic tree (EAGLE-2, arXiv:2406.16858, section 4). `TreeConfig.chain(n)` is a chain,
    `TreeConfig.static(parents)` a static tree (EAGLE, Medusa).

    Attributes:
      depth: D, drafted levels = sequential head passes per cycle.
      top_k: K, children per node and width of the frontier.
      num_nodes: N, drafted nodes after the rerank.
      parents: static tree: the index of every drafted node's parent among the drafted nodes, -1 for the root. Siblings
        take the head's candidates in order of rank. `depth`, `top_k` and `num_nodes` follow from it.
      rank_by: how the frontier is ranked: "value" (cumulative log-probability, EAGLE-2) or "confidence" (the node's own
        log-probability). The rerank always uses the value.
      rerank: keeps the best `num_nodes` of all candidates (EAGLE-2); False keeps the frontiers.
      sampled_ranking: how candidates are ranked at temperature > 0. The text does not depend on it.
        "draw": by the probability that the target draws the token, given the noise of the key; accepts the most.
        "law": by the head's law at the sampling temperature.
        "untempered": by the head's law at temperature 1, as the papers' code does.
      top_p: children of a node are added until their total probability reaches this, at most `top_k`. The probability
        is the one that `sampled_ranking` ranks by.
      verification: acceptance rule; at temperature 0 all rules do the same.
        "deterministic": follows the target's own draws through a ranked tree. For one key, every drafter gives the same
        text.
        "rejection", "block" (chains), "traversal" (static trees): for sampled drafts; see `drafters.rules`.
      noise_scale: for "draw": scale of the Gumbel noise by which the drafter's log-probabilities are assumed to differ
        from the target's. Measured on the bundled heads (`infer.acceptance` at temperature 1): 0.5 to 1 were equally
        good, small trees best at 1, wide ones at 0.7.

    Raises:
      ConfigError: naming the field and its rule.
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
        for name in ("depth", "top_k", "num_nodes"):
            object.__setattr__(self, name, _as_int(getattr(self, name)))
        check_fields(self, "depth", "top_k", "num_nodes")
        for name, low, high in (("top_p", 0.0, 1.0), ("noise_scale", 0.01, 100.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not low < float(value) <= high:
                raise ConfigError(f"TreeConfig.{name} must lie in ({low:g}, {high:g}], got {value!r}. Choose another.")
        dynamic, rule = self.parents is None, self.verification
        if self.parents is not None:
            self._derive_from_parents(tuple(map(_as_int, self.parents)))
        formula = "top_k + (depth - 1) * top_k**2" if self.rerank else "top_k * depth without rerank"
        for wrong, message in (
            (not dynamic and (self.rank_by != "value" or not self.rerank),
             "rank_by and rerank must be left out for a static tree (parents). It has no candidates to choose among."),
            (rule != "deterministic" and dynamic and self.top_k != 1,
             f"verification must be 'deterministic' for a dynamic tree, got {rule!r}. Use TreeConfig.chain or "
             "TreeConfig.static."),
            (rule == "block" and self.top_k > 1,
             "verification must not be 'block' for a tree. Use 'traversal', or a chain."),
            (rule != "deterministic" and self.top_p != 1,
             f"top_p must be 1 for verification={rule!r}, which samples children, got {self.top_p}. Leave it out."),
            (dynamic and self.num_nodes > self.pool_size,
             f"num_nodes must be at most {self.pool_size}, the candidates of depth={self.depth} and "
             f"top_k={self.top_k} ({formula}), got {self.num_nodes}. Lower it."),
            (dynamic and self.num_nodes < self.depth,
             f"num_nodes must be at least depth={self.depth}, got {self.num_nodes}. Raise it: with fewer nodes no "
             "node of the last level can be kept with its ancestors."),
        ):  # fmt: skip
            if wrong:
                raise ConfigError(f"TreeConfig.{message}")

    def _derive_from_parents(self, parents: tuple[int, ...]) -> None:
        derived = {"depth": max(static_depths(parents)), "top_k": max(sibling_ranks(parents)) + 1,
                   "num_nodes": len(parents)}  # fmt: skip
        for name, value in derived.items():
            if (given := getattr(self, name)) not in (value, getattr(TreeConfig, name)):
                raise ConfigError(f"TreeConfig.{name} must be {value} for these parents, got {given}. Leave it out.")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "parents", parents)

    @property
    def pool_size(self) -> int:
        """Number of candidates before the rerank; without rerank, number of frontier nodes."""
        if not self.rerank:
            return self.top_k * self.depth
        return self.top_k + (self.depth - 1) * self.top_k**2

    @classmethod
    def chain(cls, length: int, verification: Verification = "deterministic") -> TreeConfig:
        """Returns a chain of `length` tokens."""
        return cls(depth=length, top_k=1, num_nodes=length, verification=verification)

    @classmethod
    def static(
        cls, parents: Sequence[int], verification: Verification = "deterministic", *, top_p: float = 1.0
    ) -> TreeConfig:
        """Returns a static tree with these `parents`; EAGLE-1's are `EAGLE1_PARENTS`."""
        given: Any = () if parents is None else parents  # None would be a dynamic tree
        return cls(parents=given, verification=verification, top_p=top_p)


EAGLE1_PARENTS = (*[-1] * 4, 0, 0, 0, 1, 1, 2, 2, 3, 4, 4, 4, 5, 5, 6, 6, 7, 12, 12, 12, 20, 20)
"""The static tree of EAGLE-1 (arXiv:2401.15077): 25 drafted nodes in levels of 4, 8, 8, 3 and 2."""


def _as_int(value: Any) -> Any:
    """Converts NumPy's integers to Python's; returns other values unchanged, for the checks."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def static_depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Returns the depth of every drafted node of a static tree; children of the root have depth 1.

    Raises:
      ConfigError: there is no node, or a parent does not precede its child.
    """
    if not parents:
        raise ConfigError("TreeConfig.parents must have at least one node, got none. Add -1, a child of the root.")
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if not isinstance(parent, int) or isinstance(parent, bool) or not -1 <= parent < node:
            earlier = f" or an earlier node, 0 to {node - 1}" if node else ""
            raise ConfigError(
                f"TreeConfig.parents[{node}] must be -1 (the root){earlier}, got {parent!r}. List parents first."
            )
        depths.append(1 if parent == -1 else depths[parent] + 1)
    return tuple(depths)


def sibling_ranks(parents: Sequence[int]) -> tuple[int, ...]:
    """Returns the rank of every node among its siblings, from 0 in order of appearance."""
    seen: dict[int, int] = {}
    ranks = []
    for parent in parents:
        ranks.append(seen.get(parent, 0))
        seen[parent] = ranks[-1] + 1
    return tuple(ranks)
