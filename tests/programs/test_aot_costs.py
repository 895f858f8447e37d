"""Tests the costs that `infer.aot` computes from HLO and from the sizes of a model."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from eagle_jax import TreeConfig
from eagle_jax.core import make_sampling
from eagle_jax.models import presets
from eagle_jax.parallel import make_mesh
from infer.aot import __main__ as aot
from infer.aot import programs
from infer.aot.costs import Program
from infer.common import memory
from infer.common.memory import least_bytes, local_bytes
from tests.models import tiny_head, tiny_target

TEXT = (Path(__file__).parent / "toy.hlo").read_text(encoding="utf-8")  # by hand, after dumps of a v5e:2x2


def test_costs_of_a_loop():
    """An update in place costs the update, a slice the slice, VMEM nothing, a loop its turns."""
    program = Program(TEXT)
    cache, new, part = 8 * 64 * 128 * 2, 8 * 128 * 2, 2 * 4 * 16
    body = 2 * new + new + 2 * cache + part
    assert program.traffic(program.loop_body("walk/while")) == body
    assert program.traffic("main") == 3 * body + 4 * (64 * 32 + 16 * 32)
    sent, scattered = new / 1e6, 4e-6 * 64 * 32
    assert program.collectives("main") == {
        "all-reduce": {"times": 3, "mb": 3 * sent, "largest": sent},
        "reduce-scatter": {"times": 1, "mb": scattered, "largest": scattered},
    }
    assert program.copies("main", (1, 8, 64, 128)) == ["copied"]
    assert program.host_transfers() == []
    called = TEXT.replace("copy(%in.place)", 'custom-call(%in.place), custom_call_target="xla_python_cpu_callback"')
    assert Program(called).host_transfers() == ["copied"]
    endless = TEXT.replace("direction=LT", "direction=NE")
    assert Program(endless).traffic("body") * 2 == Program(TEXT).traffic("main") - Program(endless).traffic("main")
    with pytest.raises(ValueError, match="got 0"):
        program.loop_body("absent/while")


def test_the_attention_kernel_reads_the_blocks_that_hold_tokens():
    """Blocks of 512 slots, once per tile of 256 tokens; the other operands once, the result once."""
    cache, query, new = 2 * 8 * 128 * 2176 * 2, 2 * 8 * 4 * 512 * 128 * 2, 2 * 8 * 512 * 128 * 2
    shapes = ["s32[2]", "bf16[2,8,4,512,128]", "bf16[2,8,512,128]", "bf16[2,8,512,128]", "bf16[1,512,512]",
              "bf16[2,8,128,2176]", "bf16[2,8,2176,128]"]  # fmt: skip
    lines = [f"  %p{index} = {shape} parameter({index})" for index, shape in enumerate(shapes)]
    call = f"  ROOT %attend_cached.1 = {shapes[1]} custom-call({', '.join(f'%p{i}' for i in range(7))})"
    text = "\n".join(["ENTRY %main () -> f32[] {", *lines, f'{call}, custom_call_target="tpu_custom_call"', "}"])
    rest = 4 * 2 + 2 * query + 2 * new + 2 * 512 * 512
    assert Program(text).traffic("main") == rest + 2 * 2 * cache
    assert Program(text, 1).traffic("main") == rest + 2 * 2 * cache * 512 / 2176
    assert Program(text, 513).traffic("main") == rest + 2 * 2 * cache * 1024 / 2176


def test_a_gather_beside_products_counts_once():
    """The compiler splits it over the fusions that it runs beside; each of them passes the buffers on."""
    program = Program(TEXT)
    assert program.traffic("chain") == 2 * (16 * 32 + 64 * 32) + 2 * 2 * 8 * 16
    assert program.collectives("chain") == {"all-gather": {"times": 1, "mb": 4.096e-3, "largest": 4.096e-3}}


def test_the_floor_of_a_cycle():
    """Weights and committed tokens once, the head once per level; a window is read as a whole, an embedding is not."""
    config = dataclasses.replace(presets.model("qwen3-30b-a3b", 2), windows=(64, 0))
    mesh = make_mesh(1, 1, 1, devices=jax.devices("cpu")[:1])
    work = programs.generation(
        config, "eagle3@3x2x5", config, mesh, batch=2, prompt=128, max_tokens=64, sampling=make_sampling(0.0),
        draft_vocab=256, drafter_weights="int8", context=100,
    )  # fmt: skip
    hidden, heads, groups, size, vocab = 2048, 32, 4, 128, config.vocab_size
    attention = hidden * size * (2 * heads + 2 * groups) + 2 * size
    expert, router, norms = 3 * hidden * config.experts.intermediate_size, hidden * 128, 2 * hidden
    layer = attention + 2 * 6 * 8 * expert + router + norms  # 2 rows of 6 nodes with 8 choices each, of 128 experts
    read = 2 * (2 * layer + hidden + vocab * hidden)
    read += 2 * 2 * groups * size * 2 * (64 + 100)
    drafter = work.resident["weights"]["drafter"]
    once, fused = local_bytes(drafter), local_bytes(drafter["head"]["fc"])
    assert work.floors[max(work.floors)] == pytest.approx(read + 3 * (once - fused) + fused, rel=1e-6)
    assert list(work.by_rows) == [1, 4, 6] and work.levels == 3
    growth = (work.by_rows[6] - work.by_rows[4]) / (work.by_rows[4] - work.by_rows[1])
    assert growth == pytest.approx(2 / 3, rel=0.01) and work.by_rows[6] > 5 * work.by_rows[1]


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_the_floor_of_a_head(kind):
    """EAGLE-1 reads the target's lm_head in every level; EAGLE-3 reads its own, and fuses features once."""
    target, head = tiny_target(), tiny_head(kind, TreeConfig(3, 2, 5))
    keys = [jnp.zeros((2, 2, 8, 16))] * 2
    read = functools.partial(least_bytes, target.config, {"target": target.params}, (keys, keys))
    plain = read(None, 2, 4)
    assert plain == local_bytes(target.params) - local_bytes(target.params["embed_tokens"]) + 4 * 2 * 2 * 2 * 2 * 4 * 16
    level = local_bytes(head.params["head"]) + local_bytes(head.params["d2t"] if kind == "eagle3" else {})
    once = local_bytes(head.params["head"]["fc"]) if kind == "eagle3" else 0.0
    level += local_bytes(target.params["lm_head"]) if kind == "eagle1" else -once
    assert read(head, 2, 4) == plain + once + 3 * level and read(head, 2, 4, 1.5) == plain + once + 1.5 * level
    embeds = {"embed_tokens": {"embedding": jnp.zeros((12, 16))}}  # of these only rows are read
    own = dataclasses.replace(head, params=head.params | {"head": head.params["head"] | embeds})
    assert read(own, 2, 4) == plain + once + 3 * level


@pytest.mark.parametrize(("asked", "read"), [(40000.0, 32768), (1.0, 16384), (5e9, 999997440)])
def test_a_part_reads_so_many_bytes(asked, read, monkeypatch):
    monkeypatch.setattr(memory.jnp, "ones", lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32))
    part, count = memory.reading(asked)
    assert count == 4 * part.params["weight"].size == read


def test_what_the_parts_of_a_cycle_cost():
    """By hand: a chip of 100 bytes and 10 operations per second, a step that must read 180 bytes, or 360 at the end."""
    sizes = None, None, {}, SimpleNamespace(size=2), (), 0.0
    cycle = programs.Workload(*sizes, 0.0, {8: 340.0, 16: 520.0}, {1: 4.0, 4: 16.0, 16: 64.0}, 4)
    plain = programs.Workload(*sizes, 8.0, {8: 180.0, 16: 360.0})
    parts = aot.cost_of_parts(cycle, plain, aot.Chip(0.0, 100.0, 10.0))
    # 0.2, 0.8 and 3.2 s of arithmetic, 1.8 or 3.6 s of memory; four levels read 160 bytes more than a step.
    later = {"rows": [1, 4, 16], "passes": [1.0, 1.0, 1.0], "level": 0.1111, "slots": 16}
    assert parts == {"rows": [1, 4, 16], "passes": [1.0, 1.0, 1.778], "level": 0.2222, "slots": 8, "longer": later}


@pytest.mark.parametrize(("share", "says"), [(1.5, True), (133321.9, False)])
def test_a_model_that_stays_on_the_chip_has_no_ratio(share, says):
    words = aot.ratio_words(62.0, share)
    assert words.startswith("A cycle costs 62.00 plain steps")
    assert ("says nothing about this model" not in words) == says
