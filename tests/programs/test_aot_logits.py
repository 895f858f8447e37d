"""Tests that programs compiled for TPUs write no logits to HBM that they do not need."""

from __future__ import annotations

import pytest

from tests.programs.test_aot import IMPORTS, needs_libtpu, on_tpu

ARGMAX = """
from eagle_jax.models.presets import model

target = model("llama-3.1-8b", 1)
chip, devices = chip_and_devices("v6e:1x1")
work = generation(
    target, "pld@59", target, make_mesh(devices=devices), sampling=make_sampling(TEMPERATURE), batch=8, prompt=128,
    max_tokens=128, draft_vocab=1024,
)
print(json.dumps(measure(work, chip, "cycle")), flush=True)
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("temperature", "most"), [(0.0, 0.5), (0.8, 2.5)])
def test_verification_processes_no_more_logits_than_it_needs(repository, temperature, most):
    """Those of 8 rows of 60 tokens have 0.25 GB in float32, more than the chip holds outside HBM.

    Greedy, the argmax is one with the lm_head, and none are written. Sampled, they are written once, and those of the
    visited nodes alone are read, which is at most one in seven.
    """
    (found,) = on_tpu(repository, "-c", IMPORTS + ARGMAX.replace("TEMPERATURE", repr(temperature)))
    logits = 8 * 60 * 128256 * 4 / 1e9
    assert found["temporaries_gb"] < most * logits
    assert found["traffic_gb"] < found["floor_gb"] + most * logits


CHILDREN = """
import infer.aot.__main__ as aot

programs = []


class Kept(aot.Program):
    def __init__(self, *given):
        super().__init__(*given)
        programs.append(self)


aot.Program = Kept
target = DecoderConfig(2048, 512, 1024, 1, num_heads=4, num_kv_heads=2, head_dim=128)
chip, devices = chip_and_devices("TOPOLOGY")
mesh, law = make_mesh(devices=devices), make_sampling(0.0)
work = generation(target, "eagle3@4x10x20", target, mesh, sampling=law, batch=BATCH, prompt=128, max_tokens=128,
                  draft_vocab=2000)
measure(work, chip, "cycle")
(program,) = programs
wide = [(one.opcode, part.dims, part.hbm) for one, _, _ in program.moves(program.loop_body(work.loop))
        for part in one.buffers if part.dims[-1:] == (2000,) and len(part.dims) > 1]
print(json.dumps({"rows": sorted({dims[-2] for _, dims, _ in wide}), "opcodes": [one for one, _, _ in wide],
                  "hbm": sum(hbm for _, _, hbm in wide)}), flush=True)
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("topology", "batch"), [("v5e:1x1", 1), ("v5e:1x1", 8), ("v6e:1x1", 8)])
def test_the_heads_logits_stay_on_the_chip(repository, topology, batch):
    """Top-k reads them where the product with the lm_head leaves them, and does not sort the draft vocabulary."""
    program = CHILDREN.replace("TOPOLOGY", topology).replace("BATCH", str(batch))
    (found,) = on_tpu(repository, "-c", IMPORTS + program)
    assert 10 in found["rows"] or 10 * batch in found["rows"]  # the children of ten nodes at once
    assert found["hbm"] == 0 and "sort" not in found["opcodes"]
