"""Sets up a training run: checked options, shape of the head, mesh, target, held-out prompts."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict

import eagle_jax
from eagle_jax.checkpoints import config_directory, load_target_checkpoint, read_target_config
from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig
from eagle_jax.core.types import Params
from eagle_jax.data.corpus import Layout, Source, prompts_by_source
from eagle_jax.parallel import FSDP, TENSOR, make_mesh, param_shardings, placer
from infer.common.programs import at_least_one, check_seed, naming, not_negative, option_of
from train.loop.options import HeadArgs, RunArgs
from train.loop.places import sources_of

DRAFT_VOCAB = 32000
"""Default size of a draft vocabulary, as in the published heads."""


def check_run(args: RunArgs) -> None:
    """Validates the options of every run.

    Raises:
      ValueError: naming the option.
    """
    at_least_one(args, "steps", "rows", "micro_batches", "length", "log_every", "save_every", "fsdp", "tensor",
                 "eval_prompts", "eval_tokens", "chunk", "warmup")  # fmt: skip
    not_negative(args, "eval_every", "data_axis")
    check_seed(args)
    for name in ("rate", "clip", "max_gradient"):
        if (value := getattr(args, name)) is not None and not value > 0:
            raise ValueError(f"{option_of(name)} must be above 0, got {value}. Raise it.")
    if args.features is not None:
        with naming("--features", args.features):
            Layout.load(args.features)
    if args.eval_every and not args.heldout:
        raise ValueError("--eval-every must come with --heldout, the prompts to measure tau on. Give both or neither.")
    if args.heldout and args.eval_tokens >= args.length:
        raise ValueError(f"--eval-tokens must be below --length {args.length}, got {args.eval_tokens}. Lower it.")
    sources = [sources_of(args.data), sources_of(args.heldout, "--heldout")]
    given = [{str(at) for one in part for at in (one.name, *map(Path.resolve, one.files))} for part in sources]
    if both := sorted(set.intersection(*given)):
        raise ValueError(f"--heldout must be apart from --data, got {both[0]} in both. Leave it out of one.")


def head_config(args: HeadArgs, target: DecoderConfig) -> HeadConfig:
    """Returns the shape of the head: one layer, as wide as the target's."""
    width = args.head_intermediate or target.intermediate_size
    layer = target.one_layer(intermediate_size=width, tie_word_embeddings=False)
    if args.method != "eagle3":
        return HeadConfig("eagle1", layer, target.vocab_size, target.hidden_size, (target.num_layers,))
    # Servers run Llama's layer, without biases and q/k norms, for every target.
    layer = dataclasses.replace(layer, qk_norm=False, qkv_bias=False, out_bias=False, mlp_bias=False)
    taps = taps_of(args.taps, target.num_layers)
    if (args.draft_vocab or 0) > target.vocab_size:
        raise ConfigError(
            f"--draft-vocab must be at most the target's vocabulary of {target.vocab_size}, got {args.draft_vocab}. "
            "Lower it, or give 0 for the whole."
        )
    size = min(DRAFT_VOCAB if args.draft_vocab is None else args.draft_vocab or target.vocab_size, target.vocab_size)
    switches = {"fc_norm": args.fc_norm, "norm_output": args.norm_output}
    return HeadConfig("eagle3", layer, size, target.hidden_size, taps, **switches)


def check_initial(init: str | None, given: Any, wanted: Any) -> None:
    """Raises a `ConfigError` if initial weights do not fit; it has the fields that differ from the run's."""
    theirs, ours = (flatten_dict(dataclasses.asdict(config)) for config in (given, wanted))
    pairs = [(path[-1], theirs.get(path), ours.get(path)) for path in theirs | ours]
    if other := "; ".join(f"{name} is {a} there and {b} here" for name, a, b in pairs if a != b):
        raise ConfigError(f"--init must fit this run, got {init}: {other}. Give other weights or other options.")


def check_copied(args: HeadArgs, head: HeadConfig, target: DecoderConfig) -> None:
    """Raises a `ConfigError` if the head's layer cannot start with the target's last one."""
    problem = ""
    if args.init is not None:
        problem = "--init has the weights of the layer already"
    elif target.block != "llama" or target.experts is not None:
        problem = "the layers of this target are not those of a Llama"
    elif head.layer.intermediate_size != target.intermediate_size:
        problem = f"--head-intermediate {args.head_intermediate} is not the target's {target.intermediate_size}"
    if problem:
        raise ConfigError(f"--copy-layer must come with a head that fits the target's layers: {problem}. Drop one.")


def taps_of(given: tuple[int, ...] | None, layers: int) -> tuple[int, ...]:
    """Returns the hidden states to fuse; by default a low, a middle and a high one.

    Raises:
      ConfigError: a tap is outside the target, or the target has too few layers for the default.
    """
    if given is None and layers < 6:
        raise ConfigError(f"--taps must be given for a target of {layers} layers, got none. Name three hidden states.")
    taps = given or (2, layers // 2, layers - 3)
    if outside := [tap for tap in taps if not 0 <= tap <= layers]:
        raise ConfigError(
            f"--taps must be hidden states of the target, 0 to {layers}, got {' '.join(map(str, outside))}. "
            "Number them by layer; 0 is the embedding."
        )
    return taps


def load_target(path: str | Path, args: RunArgs, mesh: jax.sharding.Mesh, *, layers: bool = False) -> eagle_jax.Target:
    """Loads the target, without its layers if features are stored and no tau is measured.

    Args:
      layers: load the layers in every case.

    Raises:
      ConfigError: the context is shorter than `--length`. CheckpointError: the target cannot be loaded.
    """
    room = read_target_config(config_directory(path)).max_position
    if args.length > room:
        raise ConfigError(f"--length must be at most the target's context of {room}, got {args.length}. Lower it.")
    if layers or args.features is None or args.heldout:
        return eagle_jax.load_target(path, args.dtype, weights=args.weights, mesh=mesh)
    config, params = load_target_checkpoint(path, args.dtype, place=placer(mesh), layers=False, weights=args.weights)
    return eagle_jax.Target.from_params(config, params, str(path), mesh)


def mesh_of(args: RunArgs) -> jax.sharding.Mesh:
    """Returns the mesh over all devices of all processes.

    Raises:
      ConfigError: rows or axes do not divide evenly.
    """
    devices = jax.device_count()
    if devices % (args.fsdp * args.tensor):
        raise ConfigError(
            f"--fsdp times --tensor must divide the {devices} devices, got {args.fsdp} times {args.tensor}. Lower one."
        )
    data = args.data_axis or devices // (args.fsdp * args.tensor)
    if jax.process_count() > 1 and data * args.fsdp * args.tensor != devices:
        raise ConfigError(f"--data-axis must use all {devices} devices of several processes, got {data}. Leave it out.")
    parts = args.micro_batches * data * args.fsdp
    if args.rows % parts:
        raise ConfigError(
            f"--rows must be a multiple of {parts} (--micro-batches {args.micro_batches} times the "
            f"{data * args.fsdp} devices that hold rows), got {args.rows}. Change one."
        )
    return make_mesh(data, args.tensor, args.fsdp)


def generation_mesh(mesh: jax.sharding.Mesh, target: eagle_jax.Target) -> jax.sharding.Mesh:
    """Returns a mesh of the same devices for `generate`, without "fsdp" and with the widest "tensor".

    With "fsdp" the compiler gathers all layers before the loop over cycles: whole weights on every device (0.46 GB of
    temporaries per layer of an 8B model, by `infer.aot` for v5e:4x4).
    """
    if mesh.shape[FSDP] == 1:
        return mesh
    widest = math.gcd(mesh.size // jax.process_count(), target.config.num_kv_heads)
    for tensor in (size for size in range(widest, 0, -1) if widest % size == 0):
        found = make_mesh(mesh.size // tensor, tensor, devices=list(mesh.devices.flat))
        with contextlib.suppress(ConfigError):  # such as an odd vocabulary; 1 divides every size
            param_shardings(target.params, found)
            break
    return found


def respread(params: Params, mesh: jax.sharding.Mesh) -> Params:
    """Moves parameters to another mesh of the same devices, also over several processes."""
    return jax.jit(lambda tree: tree, out_shardings=param_shardings(params, mesh))(params)


def weights_of(sources: list[Source]) -> dict[str, float] | None:
    """Returns the weight of each source; None if no source has one, so that documents count equally."""
    missing = [source.name for source in sources if source.weight is None]
    if 0 < len(missing) < len(sources):
        named = ", ".join(missing)
        raise ConfigError(f"--data must give a weight to all sources or none, got none for {named}. Write path@weight.")
    return None if missing else {source.name: float(source.weight or 0) for source in sources}


def held_prompts(args: RunArgs, tokenizer: Any, mesh: jax.sharding.Mesh) -> list[list[int]]:
    """Returns the first held-out prompts that leave room for a reply; sources take turns.

    The number is a multiple of the devices that hold rows. Too few prompts are repeated.
    """
    longest = args.length - args.eval_tokens
    parts = mesh.size // mesh.shape[TENSOR]
    count = parts * -(-args.eval_prompts // parts)
    options = f" (--length {args.length} less --eval-tokens {args.eval_tokens})"
    with naming("--heldout", " ".join(args.heldout)):
        found = prompts_by_source(args.heldout, tokenizer, count, longest, options).values()
    chosen = [part[turn] for turn in range(count) for part in found if turn < len(part)]
    return list(itertools.islice(itertools.cycle(chosen), count))
