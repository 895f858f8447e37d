"""Defines mixtures of experts: a router chooses experts for every token, and tokens sorted by expert run in groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle_jax.config import DecoderConfig, ExpertsConfig
from eagle_jax.models.layers import Linear, parameter, product

CPU_ROWS = 8
"""Rows of one product on CPU. With one size, the result of a row does not depend on how many rows a pass has."""
_DIMENSIONS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


class Stack(NamedTuple):
    """Holds one projection of all experts.

    Attributes:
      weight: as in checkpoints, or quantised: q [E, O, I] and scale [E, O]. bias: None without one.
    """

    weight: Float[Array, "E O I"] | Mapping[str, Array]
    bias: Float[Array, "E O"] | None

    @property
    def num_experts(self) -> int:
        """Returns E."""
        return len(self.weight["q"] if isinstance(self.weight, Mapping) else self.weight)


def grouped_product(x: Float[Array, "M I"], stack: Stack, sizes: Int[Array, " E"], dtype: str) -> Float[Array, "M O"]:
    """Multiplies the first `sizes[0]` rows by expert 0, the next `sizes[1]` rows by expert 1, and so on.

    Rows beyond the sum of `sizes` have undefined values. On CPU this costs as if every expert had all rows.
    """
    # Contracts the last axis of the weights: on TPU a transpose would be a copy of all experts, as would a conversion
    # of quantised ones. The product takes two types.
    weight, scale = stack.weight, None
    if isinstance(weight, Mapping):
        weight, scale = weight["q"], weight["scale"]
    kind = jnp.dtype(dtype if scale is None else "float32")
    y = jax.lax.ragged_dot_general(x, weight, sizes, _DIMENSIONS, preferred_element_type=kind)
    expert = jnp.sum(jnp.cumsum(sizes)[None] <= jnp.arange(len(x))[:, None], axis=1)
    expert = jnp.minimum(expert, len(sizes) - 1)
    if scale is not None:
        y = (y * scale[expert]).astype(dtype)
    return y if stack.bias is None else y + stack.bias[expert].astype(dtype)


def by_blocks(
    run: Callable[[Array, Array], Array], x: Float[Array, "M I"], sizes: Int[Array, " E"], features: int
) -> Float[Array, "M O"]:
    """Returns `run(rows, expert)` of all rows, sorted by expert as in `grouped_product`, in blocks of one expert.

    Args:
      run: computes [CPU_ROWS, features] in float32.
    """
    rows, count = len(x), len(sizes)
    blocks = -(-sizes // CPU_ROWS)
    ends, starts = jnp.cumsum(blocks), jnp.cumsum(sizes) - sizes
    padded = jnp.pad(x, ((0, CPU_ROWS), (0, 0)))

    def add_block(out: Array, number: Array) -> tuple[Array, None]:
        used = number < ends[-1]
        expert = jnp.minimum(jnp.sum(ends <= number), count - 1)
        start = starts[expert] + (number - ends[expert] + blocks[expert]) * CPU_ROWS
        # The last rows of a block may be another expert's, whose own block comes later and overwrites the result.
        start = jnp.where(used, start, rows)
        block = jax.lax.dynamic_slice_in_dim(padded, start, CPU_ROWS)
        empty = jnp.zeros((CPU_ROWS, features), jnp.float32)
        y = jax.lax.cond(used, lambda: run(block, expert), lambda: empty)
        return jax.lax.dynamic_update_slice_in_dim(out, y, start, 0), None

    out = jnp.zeros((rows + CPU_ROWS, features), jnp.float32)
    most = min(rows, rows // CPU_ROWS + count)  # blocks, for any sizes
    return jax.lax.scan(add_block, out, jnp.arange(most))[0][:rows]


def project_by(stack: Stack, expert: Int[Array, ""], x: Float[Array, "M I"], dtype: str) -> Float[Array, "M O"]:
    """Multiplies all rows by one expert."""
    y = product(x, jax.tree.map(lambda part: part[expert], stack.weight), dtype)
    return y if stack.bias is None else y + jnp.broadcast_to(stack.bias[expert].astype(dtype), y.shape)


class StackedLinear(nn.Module):
    """Declares one projection of all experts; weight is [E, out, in]."""

    shape: tuple[int, int, int]
    use_bias: bool

    @nn.compact
    def __call__(self) -> Stack:
        weight = parameter(self, "weight", nn.initializers.normal(0.02), self.shape)
        return Stack(weight, self.param("bias", nn.initializers.zeros, self.shape[:2]) if self.use_bias else None)


class Experts(nn.Module):
    """Sums the outputs of the chosen experts of every token; `mix` is the part that a mesh splits by experts."""

    config: ExpertsConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T H"], chosen: Int[Array, "B T K"], weights: Float[Array, "B T K"]
    ) -> Float[Array, "B T H"]:
        config = self.config
        count, inner, hidden = config.num_experts, config.intermediate_size, x.shape[-1]
        sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        stacks = {
            name: StackedLinear((count, *size), config.bias, name=f"{name}_proj")() for name, size in sizes.items()
        }
        return self.mix(x, chosen, weights, stacks).astype(x.dtype)

    @nn.nowrap
    def activation(self, gate: Float[Array, "M I"], up: Float[Array, "M I"]) -> Float[Array, "M I"]:
        """Returns `silu(gate) * up`, or with a limit the clamped form of gpt-oss."""
        if (limit := self.config.limit) is None:
            return nn.silu(gate) * up
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(gate * self.config.alpha) * (up + 1)

    def mix(
        self,
        x: Float[Array, "B T H"],
        chosen: Int[Array, "B T K"],
        weights: Float[Array, "B T K"],
        stacks: dict[str, Stack],
    ) -> Float[Array, "B T H"]:
        """Returns the weighted sum of the chosen experts that `stacks` holds, float32.

        Args:
          chosen: places in `stacks`. A place outside of them adds nothing: another device holds that expert.
        """
        count, top_k = stacks["gate"].num_experts, chosen.shape[-1]
        held = (chosen >= 0) & (chosen < count)
        expert = jnp.where(held, chosen, count).reshape(-1)
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.sum(expert[None] == jnp.arange(count)[:, None], axis=1, dtype=jnp.int32)

        def run(project: Callable[[str, Array, str], Array], rows: Array) -> Array:
            inner = self.activation(*(project(name, rows, x.dtype.name) for name in ("gate", "up")))
            return project("down", inner, "float32")

        def in_groups(rows: Array, stacks: dict[str, Stack], sizes: Array) -> Array:
            return run(lambda name, rows, dtype: grouped_product(rows, stacks[name], sizes, dtype), rows)

        def in_blocks(rows: Array, stacks: dict[str, Stack], sizes: Array) -> Array:
            def run_block(rows: Array, expert: Array) -> Array:
                return run(lambda name, rows, dtype: project_by(stacks[name], expert, rows, dtype), rows)

            return by_blocks(run_block, rows, sizes, x.shape[-1])

        rows = x.reshape(-1, x.shape[-1])[order // top_k]
        out = jax.lax.platform_dependent(rows, stacks, sizes, cpu=in_blocks, default=in_groups)
        out = out[jnp.argsort(order)].reshape(*chosen.shape, x.shape[-1])
        # Every token sums its experts in the order of its own ranks, whatever other rows a pass has.
        return jnp.sum(jnp.where(held[..., None], out, 0) * weights[..., None], axis=-2)


class MoE(nn.Module):
    """Mixture of experts in the place of an MLP; the router computes in float32, whatever the default precision."""

    config: DecoderConfig

    def setup(self) -> None:
        assert self.config.experts is not None
        self.router = Linear(self.config.experts.num_experts, self.config.experts.bias, dtype="float32")
        self.experts = Experts(self.config.experts)

    def __call__(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        return self.experts(x, *self.route(x))

    def route(self, x: Float[Array, "B T H"]) -> tuple[Int[Array, "B T K"], Float[Array, "B T K"]]:
        """Returns the chosen experts of every token, best first, and their float32 weights."""
        config: ExpertsConfig = self.config.experts  # type: ignore[assignment]
        with jax.default_matmul_precision("highest"):  # TPUs round the factors of float32 products by default
            logits = self.router(x)
        # Softmax keeps the order, so the best logits are the best probabilities. `top_k` is exact: the choice for a
        # token is the same in a pass of one token and in a tree.
        best, chosen = jax.lax.top_k(logits, config.top_k)
        if config.normalise:
            return chosen, jax.nn.softmax(best)
        return chosen, jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


@contextlib.contextmanager
def recorded_routes() -> Iterator[list[Int[Array, "B T K"]]]:
    """Yields a list to which every layer appends its chosen experts while a model is traced; a context manager."""
    chosen: list[Array] = []

    def call(run: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        out = run(*args, **kwargs)
        if isinstance(context.module, MoE) and context.method_name == "route":
            chosen.append(out[0])
        return out

    with nn.intercept_methods(call):
        yield chosen
