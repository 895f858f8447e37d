"""Checks that imports go one way between rooms, and that no two modules import each other."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

import eagle_jax
from eagle_jax.core.types import empty_tree

ROOT = Path(eagle_jax.__file__).parent.parent
LEAVES = {"packed", "checks", "rotary", "config", "settings", "shapes", "devices", "assets"}
# Room of eagle_jax -> the rooms that it may import. `__init__` may import every room.
ROOMS: dict[str, set[str]] = {
    "core": set(),
    **{leaf: {"checks", "rotary", "config"} for leaf in LEAVES},
    "kernels": set(),
    "models": {"core", "config", "kernels"},
    "drafters": {"core", "config", "models"},
    "parallel": {"core", "config", "models"},
    "checkpoints": {"core", "models"} | LEAVES,
    "data": {"core", "checkpoints"} | LEAVES,
    "training": {"core", "packed", "config", "models", "parallel"},
}
ROOMS["runtime"] = {*ROOMS}
ROOMS["evaluate"] = {*ROOMS}
ROOMS["viz"] = {*ROOMS}
ROOMS["integrations"] = {*ROOMS} - {"evaluate", "viz"}
# Packages that only some rooms may import: disk, network and pickles stay in one place; the core is free of Flax.
ONLY_IN: dict[str, set[str]] = {
    "flax": {"models", "drafters", "checkpoints", "training", "parallel", "integrations"},
    "tunix": {"integrations"},
    "safetensors": {"checkpoints"},
    "huggingface_hub": {"checkpoints"},
    "orbax": {"checkpoints", "parallel"},
    "grain": {"data"},
    "datasets": {"data"},
    "torch": {"checkpoints"},
    "transformers": {"checkpoints", "data", "runtime"},
}
PROGRAMS = ("infer", "train")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for top in ("eagle_jax", *PROGRAMS) for path in sorted((ROOT / top).rglob("*.py"))}


def imported(source: str, modules: object = MODULES) -> set[str]:
    """Dotted names that `source` imports; for a name of our modules, the module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports must be absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
    return found


def violations(module: str, source: str) -> list[str]:
    top, _, rest = module.partition(".")
    room = rest.partition(".")[0]
    found = []
    for name in sorted(imported(source)):
        other, _, entered = name.partition(".")
        entered = entered.partition(".")[0]
        if top != "eagle_jax":
            if top == "infer" and other == "train":
                found.append(f"{module} imports {name}: programs of infer/ know nothing of train/")
            if top == "train" and other == "infer" and entered != "common":
                found.append(f"{module} imports {name}: train/ shares only infer.common")
            continue
        if other in (*PROGRAMS, "tests"):
            found.append(f"{module} imports {name}, a program")
        if room and other == "eagle_jax" and entered != room and entered not in ROOMS[room]:
            found.append(f"{module} imports {name}: {room} may import {sorted(ROOMS[room])}")
        if other in ONLY_IN and room not in ONLY_IN[other]:
            found.append(f"{module} imports {name}: only {sorted(ONLY_IN[other])} may")
    return found


def test_imports_go_one_way():
    new = {module.split(".")[1] for module in MODULES if module.startswith("eagle_jax.")} - set(ROOMS)
    assert not new, "add a new room to ROOMS"
    found = {module: violations(module, path.read_text(encoding="utf-8")) for module, path in MODULES.items()}
    assert not {module: wrong for module, wrong in found.items() if wrong}


def test_no_two_modules_import_each_other():
    graph = {name: imported(path.read_text(encoding="utf-8")) & set(MODULES) - {name} for name, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the circle


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("eagle_jax.core.tree", "import flax.linen as nn"),
        ("eagle_jax.core.types", "from eagle_jax.config import TreeConfig"),
        ("eagle_jax.checkpoints.targets.save", "from eagle_jax.runtime.target import Target"),
        ("eagle_jax.runtime.generation", "import safetensors.numpy"),
        ("train.head", "from infer.tuning import search"),
        ("infer.bench", "from train.loop import options"),
        ("eagle_jax.runtime.target", "from tunix.models.qwen3 import model"),
        ("eagle_jax.evaluate", "from eagle_jax.integrations.tunix import EagleRollout"),
    ],
)
def test_the_rule_can_fail(module, source):
    assert violations(module, source)


def test_a_module_stays_short():
    long = {name: lines for name, path in MODULES.items() if (lines := path.read_text("utf-8").count("\n")) > 400}
    assert not long, f"modules of more than 400 lines: {long}"


def test_no_module_shares_a_name_with_a_public_function():
    for top in ("eagle_jax", *PROGRAMS):
        modules = {name: path for name, path in MODULES.items() if name.split(".")[0] == top}
        nodes = [node for path in modules.values() for node in ast.parse(path.read_text("utf-8")).body]
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert not functions & {name.rpartition(".")[2] for name in modules}


def test_import_is_light():
    """`import eagle_jax` imports none of these: they are slow or optional. `eagle_jax.viz` needs no import."""
    code = """
import sys, eagle_jax
eagle_jax.viz.tree_text
print([name for name in ("torch", "transformers", "matplotlib") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.strip() == "[]"


def test_public_names():
    assert len(eagle_jax.__all__) == len(set(eagle_jax.__all__)) <= 42
    assert all(hasattr(eagle_jax, name) for name in eagle_jax.__all__)
    assert not set(eagle_jax.__all__) & {path.stem for path in (ROOT / "eagle_jax").iterdir()} - {"viz"}


def test_annotations_are_checked_in_tests():
    with pytest.raises(TypeCheckError):
        empty_tree(jnp.zeros((2,)))  # root is annotated as integers
