"""Runs of `train.head` on a random target: their directories, options and results."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import safetensors.numpy

import train.head

VOCAB = 512
OPTIONS = dict(
    unroll=3, taps=(0, 1, 2), draft_vocab=64, rate=3e-3, warmup=2, steps=6, rows=8, length=32, dtype="float32",
    log_every=1, save_every=2, eval_prompts=2, eval_tokens=8, eval_tree="2,2,3", tensorboard=False, remat=False,
)  # fmt: skip


def args_of(place: Path, out: Path, **changes) -> train.head.Args:
    return train.head.Args(
        target=str(place / "target"), data=(str(place / "train.jsonl"),), out=out, **{**OPTIONS, **changes}
    )


def losses(out: Path) -> list[list[float]]:
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [[line["loss"], line["gradient"], *line["accuracy"]] for line in lines if "loss" in line]


def head_of(out: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(out / "head" / "model.safetensors")


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def spawn(place: Path, out: Path, devices: int, port: int = 0, index: int = 0, **changes) -> subprocess.Popen:
    """`python -m train.head` in a process of its own, one of two if there is a port."""
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in {**OPTIONS, **changes}.items()}
    values |= {"target": str(place / "target"), "data": [str(place / "train.jsonl")], "out": str(out)}
    path = place / f"{out.name}.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    flags = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    if port:
        environment |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": "2",
                        "JAX_PROCESS_ID": str(index)}  # fmt: skip
    command = [sys.executable, "-m", "train.head", "--config", str(path)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(*processes: subprocess.Popen) -> list[str]:
    texts = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(texts)
    return texts


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]
