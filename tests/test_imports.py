"""Imports go one way: each room of eagle_jax may enter only the rooms below it (read from the syntax tree)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

import eagle_jax
from eagle_jax.types import empty_tree

CORE = {"randomness", "types", "config", "tree", "sampling", "cache", "verify", "rejection"}
# Room -> the other rooms it may import. A module at the top of the package is a room, and so is a sub-package.
MAY_ENTER: dict[str, set[str]] = {
    "randomness": set(),
    "types": {"randomness"},
    "config": set(),
    "tree": {"types", "config"},
    "sampling": {"types", "config", "randomness"},
    "cache": {"types", "config"},
    "verify": {"types", "config", "tree", "sampling", "cache"},
    "rejection": {"randomness", "types", "config", "tree", "sampling", "verify"},
    "finite": {"types"},
    "contract": {"types"},
    "generate": (CORE - {"rejection"}) | {"contract"},
    "models": {"types", "config"},
    "request": CORE | {"generate"},
    "drafters": CORE | {"generate", "models"},
    "training": {"types", "config", "models", "sharding"},
    "data": {"types", "config", "checkpoints", "assets"},
    "distributed": {"config", "sharding"},
    "checkpoints": {"types", "config", "models", "devices"},
    "assets": set(),
    "measure": {"devices", "data"},
    "tasks": {"data", "measure", "assets"},
    "sharding": {"types", "config"},
    "presets": {"config"},
    "hlo": set(),
    "detokenize": set(),
    "costs": {"hlo"},
    "settings": {"config"},
    "shapes": {"config"},
    "programs": {"config", "data", "settings", "devices", "interrupts"},
    "interrupts": set(),
    "devices": set(),
    "aot": CORE | {"generate", "models", "drafters", "training", "sharding", "presets", "costs"},
    "bound": {"types", "config", "drafters", "memory", "models", "sharding", "request", "devices"},
    "methods": {"types", "config", "bound", "checkpoints", "drafters", "api", "shapes", "sharding"},
    "acceptance": CORE | {"generate", "request", "distributed", "api", "bound", "finite", "memory"},
    "positions": {"types", "acceptance"},
    "converse": {"data", "api", "bound", "finite"},
    "watching": {"types", "api", "bound", "distributed", "finite", "generate", "memory", "request", "sampling"},
    "tuning": {"types", "config"},
    "memory": {"types", "request", "devices"},
    "session": {"types", "api", "bound", "finite", "generate", "memory", "request", "sampling"},
    "viz": {"types", "acceptance", "api", "positions", "detokenize"},
    "demo": {"config", "bound", "api", "methods", "assets"},
    "profile": {"types", "config", "checkpoints", "settings", "bound", "api", "methods", "distributed", "assets"}
    | {"measure"},
}
ON_TOP = {"__init__", "api"}  # may enter every room
FLAX = {"flax", "linen"}
FLAX_FREE = CORE | {"generate", "request"}
# Disk, network and pickles stay in one place.
ONLY_IN: dict[str, set[str]] = {
    "safetensors": {"checkpoints"},
    "huggingface_hub": {"checkpoints"},
    "orbax": {"checkpoints", "distributed"},
    "grain": {"data"},
    "datasets": {"data"},
    "torch": {"checkpoints"},
    "transformers": {"checkpoints", "data", "demo"},
}
PROGRAMS = {"infer", "train", "tests"}

PACKAGE = Path(eagle_jax.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def imported_names(source: str, package: str) -> list[tuple[int, str]]:
    """Line and absolute dotted name of everything `source` imports; `package` resolves relative imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
    return found


def violations(source: str, module: str) -> list[str]:
    """What `source` imports against the rules if it is the module of this dotted name, `eagle_jax.tree` say."""
    parts = module.split(".")
    room = parts[1] if len(parts) > 1 else "__init__"
    package = module if room == "__init__" else module.rpartition(".")[0]
    found = []
    for line, name in imported_names(source, package):
        top, _, rest = name.partition(".")
        entered = rest.split(".")[0]
        if top in PROGRAMS:
            found.append(f"{module}:{line} imports the program folder {top}/")
        if top in FLAX and room in FLAX_FREE:
            found.append(f"{module}:{line} imports Flax; {room} is part of the Flax-free core")
        if top in ONLY_IN and room not in ONLY_IN[top]:
            found.append(f"{module}:{line} imports {top}, which only {sorted(ONLY_IN[top])} may")
        if top == "eagle_jax" and room not in ON_TOP and entered != room:
            if (PACKAGE / f"{entered}.py").exists() or (PACKAGE / entered).is_dir():
                if entered not in MAY_ENTER[room]:
                    found.append(
                        f"{module}:{line} imports eagle_jax.{entered}; {room} may use {sorted(MAY_ENTER[room])}"
                    )
            else:
                found.append(f"{module}:{line} imports {name} from the package's __init__, which is above it")
    return found


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_go_one_way(path):
    module = dotted(path)
    room = module.split(".")[1]
    assert room in MAY_ENTER or room in ON_TOP, f"{module} is a new room: say in MAY_ENTER what it may import"
    assert not (found := violations(path.read_text(encoding="utf-8"), module)), "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "culprit"),
    [
        ("eagle_jax.tree", "import flax.linen as nn", "Flax"),
        ("eagle_jax.verify", "def f():\n    from flax import linen", "Flax"),
        ("eagle_jax.types", "from eagle_jax.config import TreeConfig", "eagle_jax.config"),
        ("eagle_jax.sampling", "from .verify import walk", "eagle_jax.verify"),
        ("eagle_jax.checkpoints.exports", "from ..generate import step", "eagle_jax.generate"),
        ("eagle_jax.checkpoints.exports", "from eagle_jax import generate", "eagle_jax.generate"),
        ("eagle_jax.models.heads", "import eagle_jax.tree", "eagle_jax.tree"),
        ("eagle_jax.generate", "from eagle_jax import load_target", "__init__"),
        ("eagle_jax.training.losses", "from train.head import main", "train/"),
        ("eagle_jax.api", "import infer.bench", "infer/"),
        ("eagle_jax.generate", "import safetensors.numpy", "safetensors"),
    ],
)
def test_the_rule_can_fail(module, source, culprit):
    assert culprit in "\n".join(violations(source, module))


def test_a_module_stays_short():
    long = {dotted(path): lines for path in MODULES if (lines := path.read_text(encoding="utf-8").count("\n")) > 400}
    assert not long, f"modules of more than 400 lines want splitting: {long}"


def test_import_is_light():
    """`import eagle_jax` pulls in neither torch nor transformers: both are slow, and torch is optional."""
    code = "import sys, eagle_jax; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert run.stdout.strip() == "[]"


def test_public_names():
    assert len(eagle_jax.__all__) == len(set(eagle_jax.__all__)) <= 34
    assert all(hasattr(eagle_jax, name) for name in eagle_jax.__all__)


def test_annotations_are_checked_in_tests():
    with pytest.raises(TypeCheckError):
        empty_tree(jnp.zeros((2,)))  # root is annotated as integers
