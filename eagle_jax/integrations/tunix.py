"""Writes the rollouts of tunix's reinforcement learning by speculative decoding; `pip install -e '.[tunix]'`.

`EagleRollout` goes into `ClusterConfig.rollout_engine` of google-tunix 0.1.7 (`tunix/rl/rl_cluster.py`).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from eagle_jax.checkpoints.files.fields import CheckpointError
from eagle_jax.checkpoints.memory import leaves_by_path, tunix_config, tunix_names
from eagle_jax.config import ConfigError, check_integer
from eagle_jax.core import CycleCost, Payoff
from eagle_jax.integrations.arrays import left_padded, own_mesh, token_log_probs
from eagle_jax.models.quantised import activation_dtype
from eagle_jax.parallel import row_groups
from eagle_jax.runtime.drafters import BoundDrafter, DraftHead, PromptLookup, WithLookup
from eagle_jax.runtime.generation import request_of
from eagle_jax.runtime.importing import Importer
from eagle_jax.runtime.rollouts import rollout
from eagle_jax.runtime.target import Target, on_mesh
from eagle_jax.training import Frozen, HeadTrainState, Objective, adapt, pack_replies, rollout_taps

try:
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ImportError as error:
    raise ImportError(
        f"eagle_jax.integrations.tunix needs google-tunix ({error}). Install it: pip install -e '.[tunix]'."
    ) from error

OBJECTIVE = Objective(steps=3)
"""Of the updates of a head that follows the policy."""
_FIELDS = {"max_new_tokens": "max_tokens_to_generate", "eos_ids": "eos_tokens", "key": "seed"} | {
    name: name for name in ("temperature", "top_k", "top_p")
}
_ALPHA = "Pass the alpha of its rules, or None if all weights are trained."


class EagleRollout(BaseRollout):
    """A rollout engine of tunix. Every text is the policy's own, whatever the drafter.

    tunix calls the class with the first four arguments; `functools.partial` sets the others:

        ClusterConfig(rollout_engine=functools.partial(EagleRollout, drafter=prompt_lookup), ...)

    It holds one copy of the policy. `update_params` writes new weights into its buffers, without compiling.

    Args:
      rollout_actor: the policy, a tunix Llama 3, Qwen2, Qwen3 or Gemma 3 without experts.
      tokenizer: tunix's `TokenizerAdapter`, or what it adapts.
      mesh: of the rollout; None is the policy's device. Axes "fsdp" and "tp" become "fsdp" and "tensor" of
        `eagle_jax.parallel.make_mesh`.
      rollout_config: `data_type` is the dtype of weights and caches; None keeps the policy's.
      drafter: `target -> BoundDrafter`, such as `eagle_jax.prompt_lookup` or a function that loads a head; None is
        plain decoding.
      lanes, cycle_cost: replies at a time and what a cycle costs, see `eagle_jax.rollout`.
      history: number of latest reply tokens that are kept for prompt lookup, alone or beside a head; 0 keeps none. The
        first call with a history compiles, and so does every doubling of its tokens, prompts or longest prompt.
      head_optimizer: updates the EAGLE head of `drafter` on the replies of every call, also of evaluation,
        `head_updates` times, as `eagle_jax.training.adapt`; None leaves it as it is.
      head_micro: parts of the replies that such an update computes one after another, to save memory.
      max_position: longest prompt and reply together, in tokens.
      lora_alpha: alpha of the policy's adapters (LoRA), which are merged into the copy at every update, in float32;
        None reads it from qwix's rules.

    Raises:
      CheckpointError: the policy cannot be imported.
      ConfigError: a number is too small, or has no effect; the mesh has other axes or does not divide the policy;
        `drafter` is no function that returns a drafter; it looks nothing up and there is a history; it has no EAGLE
        head and there is an optimizer; or `lora_alpha` is not that of the policy.
      ValueError: `cycle_cost` is no cost of the drafter. MemoryError: the copy of the policy does not fit in device
        memory.
    """

    def __init__(
        self, *, rollout_actor: Any, tokenizer: Any, mesh: Mesh | None = None, rollout_config: RolloutConfig,
        drafter: Callable[[Target], BoundDrafter] | None = None, lanes: int = 16,
        cycle_cost: float | CycleCost | None = None, history: int = 0,
        head_optimizer: optax.GradientTransformation | None = None, head_updates: int = 2, head_micro: int = 1,
        max_position: int = 32768, lora_alpha: float | None = None,
    ) -> None:  # fmt: skip
        for name, value, least in (("lanes", lanes, 1), ("history", history, 0), ("head_updates", head_updates, 1),
                                   ("head_micro", head_micro, 1), ("max_position", max_position, 1)):  # fmt: skip
            check_integer(name, value, least)
        for alone, name, other in ((drafter is None and cycle_cost is not None, "cycle_cost", "drafter"),
                                   (head_optimizer is None and head_updates != 2, "head_updates", "head_optimizer"),
                                   (head_optimizer is None and head_micro != 1, "head_micro",
                                    "head_optimizer")):  # fmt: skip
            if alone:
                raise ConfigError(f"{name} must come with a {other}, got none. Pass one, or leave {name} out.")
        if drafter is not None and not callable(drafter):
            raise ConfigError(
                f"drafter must be a function of the target, got a {type(drafter).__name__}. Pass one, such as "
                "lambda target: eagle_jax.load_drafter(path, target)."
            )
        self._device = mesh.devices.flat[0] if mesh is not None and mesh.size == 1 else None
        leaves = leaves_by_path(rollout_actor)
        config, names = tunix_config(rollout_actor, max_position), tunix_names(rollout_actor, lora_alpha)
        adapters = [path for path in leaves if "lora" in path.lower()]
        if bool(adapters) != (names.lora_alpha is not None):
            got = f"None and {adapters[0]!r}" if adapters else f"{lora_alpha!r} without adapters"
            raise ConfigError(f"lora_alpha must be that of a policy with adapters (LoRA), got {got}. {_ALPHA}")
        # A trainer of adapters sends these alone. The other leaves are its own arrays, which it does not change.
        self._adapters, self._leaves = adapters, leaves if adapters else {}
        dtype = str(jnp.dtype(rollout_config.data_type or activation_dtype(leaves)))
        self._importer = Importer(names, config, dtype, own_mesh(mesh))
        fn = on_mesh(config, dtype, self._importer.mesh)  # first: it checks the key-value heads
        params = self._importer(self._placed(leaves))
        self._target = Target(config, params, fn, type(rollout_actor).__name__, dtype, self._importer.mesh)
        with jax.default_device(self._device):
            self._drafter = None if drafter is None else drafter(self._target)
        if drafter is not None and not isinstance(self._drafter, BoundDrafter):
            got = type(self._drafter).__name__
            raise ConfigError(f"drafter must return a BoundDrafter, got a {got}. Return what load_drafter returns.")
        request_of(self._target, self._drafter, [[0]], cycle_cost=cycle_cost, max_new_tokens=1, fits=False)  # checks
        # Until the first call or update: weak references, since a trainer that resumes replaces the arrays.
        self._made_of: Any = rollout_actor, {path: weakref.ref(leaf) for path, leaf in leaves.items()}
        # tunix compares the weights of the trained model with those of `model()`, and copies them if they differ. Here
        # they always do, and a model of shapes costs no memory.
        graph, state = nnx.split(rollout_actor)
        self._model = nnx.merge(graph, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state))
        adapted = isinstance(tokenizer, TokenizerAdapter)
        self._tokenizer = tokenizer if adapted else TokenizerAdapter(tokenizer)
        self._lanes, self._cycle_cost, self._calls = lanes, cycle_cost, 0
        self._payoffs: dict[bool, Payoff | None] = {}  # of sampled and of greedy calls
        self._history, self._samples = history, collections.deque[tuple[list[int], list[int]]]()
        self._tx, self._updates, self._micro, self._tau = head_optimizer, head_updates, head_micro, float("nan")
        self._learner: HeadTrainState | None = None
        if history and not isinstance(self._drafter, PromptLookup | WithLookup):
            raise ConfigError(
                f"drafter must look prompts up if there is a history, got {self._name()}. Pass prompt_lookup, or a "
                "head with_lookup."
            )
        if head_optimizer is not None:
            if (head := self._head()) is None:
                raise ConfigError(f"drafter must be an EAGLE head if it is updated, got {self._name()}. Pass one.")
            if not isinstance(head_optimizer, optax.GradientTransformation):
                raise ConfigError(
                    f"head_optimizer must be of optax, got a {type(head_optimizer).__name__}. Pass optax.adam(3e-4)."
                )
            weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), head.params["head"])
            self._learner = HeadTrainState(weights, head_optimizer.init(weights), jnp.int32(0), jax.random.key(0))

    @property
    def target(self) -> Target:
        """The policy with its latest weights; `update_params` deletes the arrays of earlier ones."""
        return self._target

    @property
    def drafter(self) -> BoundDrafter | None:
        """The drafter of the next call, with its latest weights and history."""
        return self._drafter

    @property
    def tau(self) -> float:
        """Mean tokens per target pass of the latest call; NaN before the first one."""
        return self._tau

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """Writes one reply per prompt, by the settings of this call.

        Runs of equal prompts, as GRPO makes them, are read once. Temperature 0 is greedy; `top_k` None, 0 and -1 and
        `top_p` None switch the filter off. `seed=None` uses a new seed in every call. A reply ends before its stop
        token, as with tunix's own engine.

        Returns:
          `tokens`: int32 arrays. `left_padded_prompt_tokens`: [B, max_prompt_length] int32, wider if a prompt needs
          it. `logprobs`: float32 arrays if `return_logprobs`: at temperature 0 under the model's law, else the sampled
          one, after `top_k` and `top_p`. `logits` is empty.

        Raises:
          ValueError: `prompts` are no list of strings; `kwargs` has any other argument, such as images; or as
            `eagle_jax.rollout`, with the names of `rollout_config`.
          NotFiniteError, MemoryError: as `eagle_jax.rollout`.
        """
        if given := [name for name, value in kwargs.items() if value is not None]:
            raise ValueError(f"generate must be called with prompts and rollout_config, got {given[0]}. Leave it out.")
        if isinstance(prompts, str) or not len(prompts) or not all(isinstance(one, str) for one in prompts):
            raise ValueError(
                f"prompts must be one or more strings, got {prompts!r:.60}. Apply the chat template first."
            )
        if not isinstance(rollout_config, RolloutConfig):
            got = type(rollout_config).__name__
            raise ValueError(f"rollout_config must be a RolloutConfig, got a {got}. Pass that of the cluster.")
        self._read_again()
        ids = [self._tokenize(prompt) for prompt in prompts]
        samples = math.gcd(*(len(list(run)) for _, run in itertools.groupby(prompts)))
        sampled, given_stops = rollout_config.temperature != 0, rollout_config.eos_tokens
        found = _named(
            rollout,
            self._target,
            self._drafter,
            ids[::samples],
            lanes=self._lanes,
            cycle_cost=self._cycle_cost,
            payoff=self._payoffs.get(sampled),
            samples_per_prompt=samples,
            max_new_tokens=rollout_config.max_tokens_to_generate,
            temperature=rollout_config.temperature,
            top_k=0 if rollout_config.top_k in (None, -1) else rollout_config.top_k,
            top_p=1.0 if rollout_config.top_p is None else rollout_config.top_p,
            eos_ids=(stops := self._stops(given_stops)),
            key=self._key(rollout_config.seed) if sampled else None,
            log_probs=("law" if sampled else "target") if rollout_config.return_logprobs else None,
            taps=None if (head := self._learning()) is None else rollout_taps(self._target.config, head.config),
        )
        if found.interrupted:  # tunix would go on, and train on replies that were not written
            raise KeyboardInterrupt
        self._tau = found.tau
        if not self._history and self._learner is None:  # a drafter that learns is another one in every call
            self._payoffs[sampled] = found.payoff
        self._follow(ids, found, rollout_config.max_tokens_to_generate)
        lengths = [len(row) - (row[-1] in stops) for row in found.tokens]
        tokens = [np.asarray(row[:length], np.int32) for row, length in zip(found.tokens, lengths, strict=True)]
        kept = found.log_probs and [row[:length] for row, length in zip(found.log_probs, lengths, strict=True)]
        return RolloutOutput(
            text=[self._tokenizer.decode(row.tolist()) for row in tokens],
            logits=[],
            tokens=tokens,
            left_padded_prompt_tokens=left_padded(ids, rollout_config.max_prompt_length, self.pad_id()),
            logprobs=kept,
        )

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "B P"], completion_tokens: Int[Array, "B C"]
    ) -> Float[Array, "B C"]:
        """Returns log-probabilities of completions at temperature 1; tokens equal to the pad id are not read."""
        self._read_again()
        inputs = (jnp.asarray(prompt_tokens), jnp.asarray(completion_tokens))
        return token_log_probs(self._target.params, *inputs, fn=self._target.fn, pad_id=self.pad_id())

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Copies the weights of the trained model into the buffers of this engine.

        Equal shapes and shardings share one compiled program. Nothing is copied to the host.

        Args:
          params: a state of `nnx.Param`, or of `nnx.LoRAParam` if the policy has adapters. filter_types: is not read.

        Raises:
          CheckpointError: a parameter is missing or unknown.
        """
        self._made_of, given = None, leaves_by_path(params)
        if missing := [path for path in self._adapters if path not in given]:
            raise CheckpointError(
                f"params must have all adapters, got none for {missing[0]!r}. Pass nnx.LoRAParam too."
            )
        leaves = self._placed(self._leaves | given)
        new = self._importer(leaves, old=self._target.params)
        self._target = dataclasses.replace(self._target, params=new)
        if self._drafter is not None:
            self._drafter = self._drafter.rebind(self._target)

    def pad_id(self) -> int:
        """Returns the tokenizer's pad token."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Returns the tokenizer's stop token."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """Returns the policy's module with shapes in the place of arrays; for its weights see `target`."""
        return self._model

    def _head(self) -> DraftHead | None:
        """Returns the EAGLE head, alone or under a lookup."""
        base = self._drafter.base if isinstance(self._drafter, WithLookup) else self._drafter
        return base if isinstance(base, DraftHead) else None

    def _learning(self) -> DraftHead | None:
        return None if self._learner is None else self._head()

    def _name(self) -> str:
        return "None" if self._drafter is None else self._drafter.name

    def _placed(self, leaves: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the leaves on the device of the rollout, if it has one device of its own."""
        return leaves if self._device is None else jax.device_put(dict(leaves), self._device)

    def _read_again(self) -> None:
        """Imports the policy before the first call if it is another one: a trainer that resumes restores it late."""
        if self._made_of is None:
            return
        (actor, read), self._made_of = self._made_of, None
        leaves = leaves_by_path(actor)
        if any(path not in read or read[path]() is not leaf for path, leaf in leaves.items()):
            self._leaves = leaves if self._adapters else {}
            self.update_params(actor)

    def _stops(self, given: Any) -> list[Any]:
        """Returns the stop tokens of a call: those given, one or several, or the tokenizer's."""
        listed = [given] if isinstance(given, int | str) else [] if given is None else list(given)
        return listed or [self.eos_id()]

    def _follow(self, prompts: list[list[int]], found: Any, most: int) -> None:
        """Updates the head on replies of the present policy, and the history."""
        drafter, head = self._drafter, self._learning()
        state = self._learner
        if head is not None and state is not None:
            mesh = self._target.mesh
            # Rows without a text: a mesh and the parts of an update split equal numbers of rows.
            missing = -len(prompts) % (row_groups(mesh) * self._micro)
            width = max(map(len, prompts)) + most
            rows = pack_replies(
                prompts + [[]] * missing, found.tokens + [[]] * missing,
                [*found.features, *[found.features[0][:0]] * missing], self._target.config.hidden_size,
                1 << (width - 1).bit_length(),
            )  # fmt: skip
            frozen = Frozen(self._target.params, head.params.get("d2t"))
            for _ in range(self._updates):
                state, _ = adapt(
                    self._target.config, head.config, OBJECTIVE, self._tx, state, frozen, rows,
                    dtype=self._target.dtype, mesh=mesh, micro=self._micro,
                )  # fmt: skip
            self._learner = state
            weights = jax.tree.map(lambda new, old: new.astype(old.dtype), state.head, head.params["head"])
            head = dataclasses.replace(head, params=head.params | {"head": weights})
            drafter = WithLookup.combine(head, drafter.lookup) if isinstance(drafter, WithLookup) else head
        if self._history and isinstance(drafter, PromptLookup | WithLookup):
            self._samples.extend(zip(prompts, found.tokens, strict=True))
            kept = sum(len(row) for _, row in self._samples)
            while kept > self._history:
                kept -= len(self._samples.popleft()[1])
            own, replies = zip(*self._samples, strict=True) if self._samples else ((), ())
            drafter = drafter.with_history(replies, own)
        self._drafter = drafter

    def _tokenize(self, prompt: str) -> list[int]:
        """Returns ids with one first token, as tunix's `Sampler.tokenize`."""
        first = self._tokenizer.bos_id()
        return self._tokenizer.dedup_bos_ids(([first] if first else []) + list(self._tokenizer.encode(prompt)))

    def _key(self, seed: Any) -> Any:
        self._calls += 1
        if seed is None:
            return self._calls - 1
        is_array = isinstance(seed, jax.Array | np.ndarray)
        return int(seed) if is_array and seed.ndim == 0 and jnp.issubdtype(seed.dtype, jnp.integer) else seed


def _named(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls `rollout`; an error names the field of `RolloutConfig` that a user of tunix has set."""
    try:
        return call(*args, **options)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        if name not in _FIELDS:
            raise
        raise type(error)(f"rollout_config.{_FIELDS[name]} {rest}") from None
