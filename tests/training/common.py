"""Runs of `train.head` on a random target; random parameters and packed texts."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

import eagle_jax
import train.head
from eagle_jax.assets import bundled
from eagle_jax.checkpoints import save_target_checkpoint
from eagle_jax.config import DecoderConfig
from eagle_jax.packed import PackedTokens

VOCAB = 512
OPTIONS = dict(
    unroll=2, taps=(0, 1, 2), draft_vocab=64, rate=3e-3, warmup=2, steps=6, rows=8, length=32, dtype="float32",
    log_every=1, save_every=2, eval_prompts=2, eval_tokens=8, eval_tree="2,2,3", tensorboard=False, remat=False,
)  # fmt: skip
EAGLE = ("unroll", "taps", "draft_vocab", "eval_tree")
"""Options of EAGLE heads among them."""


def save_target(config: DecoderConfig, params: Any, directory: Path) -> None:
    """Saves a target with the bundled tokenizer."""
    save_target_checkpoint(config, params, directory, "float32")
    for path in bundled("target").glob("tokenizer*"):
        shutil.copy(path, directory)


def args_of(place: Path, out: Path, **changes) -> train.head.Args:
    return train.head.Args(
        target=str(place / "target"), data=(str(place / "train.jsonl"),), out=out, **{**OPTIONS, **changes}
    )


def logged(out: Path, name: str) -> list[dict]:
    """Returns the lines of a run's log that have a value of this name."""
    text = (out / "log.jsonl").read_text() if (out / "log.jsonl").exists() else ""
    return [line for line in map(json.loads, text.splitlines()) if name in line]


def losses(out: Path) -> list[list[float]]:
    return [[line["loss"], line["gradient"], *line["accuracy"]] for line in logged(out, "loss")]


@contextlib.contextmanager
def replaced(path: Path, content: bytes):
    """Replaces the contents of a file for a while."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def report_of(capsys) -> dict:
    """Returns the last line of output."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def check_lossless(target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter) -> None:
    prompts = [[7, 8, 9], [100, 20]]
    texts = [eagle_jax.generate(target, one, prompts, max_new_tokens=12).tokens for one in (drafter, None)]
    assert texts[0] == texts[1]


def head_of(out: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(out / "head" / "model.safetensors")


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def spawn(place: Path, out: Path, count: int = 1, **changes) -> list[subprocess.Popen]:
    """Starts `count` processes of `train.head`, each with four devices, that train as one."""
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in {**OPTIONS, **changes}.items()}
    values |= {"target": str(place / "target"), "data": [str(place / "train.jsonl")], "out": str(out)}
    path, joined = place / f"{out.name}.yaml", {}
    path.write_text(json.dumps(values))  # JSON is YAML
    if count > 1:
        joined = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": str(count)}
    start = functools.partial(
        subprocess.Popen, [sys.executable, "-m", "train.head", "--config", str(path)], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    numbers = [{"JAX_PROCESS_ID": str(index)} if joined else {} for index in range(count)]
    return [start(env={**os.environ, "JAX_PLATFORMS": "cpu", **joined, **number}) for number in numbers]


def kill(*processes: subprocess.Popen, when: Callable[[], bool]) -> None:
    """Kills processes with -9 as soon as a condition holds."""
    wait_until(when, processes[0])
    for process in processes:
        process.kill()
        process.wait()


def wait_until(ready: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.time() + 600
    while not ready():
        assert process.poll() is None and time.time() < deadline, process.communicate()[0]
        time.sleep(0.01)


def finished(*processes: subprocess.Popen, status: int = 0) -> list[str]:
    """Returns the output of processes that end with this status."""
    texts = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [status] * len(processes), "\n".join(texts)
    return texts


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def random_params(init: Callable[..., Any], config: Any, seed: int = 0, size: float = 0.4) -> Any:
    """Returns normal weights shaped as `init(config, key)`; size 0.4 makes attention and norms matter."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    return jax.tree.map(lambda leaf: jnp.asarray(size * rng.normal(size=leaf.shape), leaf.dtype), shapes)


def packed_texts(lengths: tuple[tuple[int, ...], ...], width: int, vocab: int) -> PackedTokens:
    """Returns rows of `width` tokens with documents of these lengths; most tokens are supervised."""
    rng = np.random.default_rng(4)
    segments, positions = np.zeros((2, len(lengths), width), np.int32)
    for row, sizes in enumerate(lengths):
        documents = np.repeat(np.arange(len(sizes)), sizes)
        segments[row, : len(documents)] = documents + 1
        positions[row, : len(documents)] = np.concatenate([np.arange(size) for size in sizes])
    supervised = (rng.random(segments.shape) < 0.8) & (positions > 0)
    tokens = rng.integers(0, vocab, segments.shape, np.int32)
    return PackedTokens(*map(jnp.asarray, (tokens, supervised, segments, positions)))
