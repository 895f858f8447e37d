"""Every method, compiled for a TPU that is not there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # compiles for TPU: make test-all
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPU needs libtpu (pip install libtpu)"
)

METHODS = """
import json
from infer import aot
from eagle_jax.config import DecoderConfig, MedusaConfig, TreeConfig
from eagle_jax.models.presets import eagle3_head
from eagle_jax.core.sampling import make_sampling

target = DecoderConfig(1024, 256, 512, 2, num_heads=4, num_kv_heads=2, head_dim=64)
small = DecoderConfig(1024, 128, 256, 1, num_heads=2, num_kv_heads=1, head_dim=64)
heads = {kind: MedusaConfig("medusa" if kind == "medusa" else "hydra", 256, 1024, 4, 1, prefix)
         for kind, prefix in (("medusa", None), ("hydra++", target.one_layer()))}
static, warm = (-1, -1, -1, 0, 0, 1, 3, 3), make_sampling(0.8)
works = {
    "pld": ("pld", TreeConfig(), make_sampling(0.0)),
    "lookahead": ("lookahead", TreeConfig(), make_sampling(0.0)),
    "medusa": (heads["medusa"], TreeConfig.static(static), make_sampling(0.0)),
    "hydra++": (heads["hydra++"], TreeConfig(3, 4, 16), warm),
    "small model, rejection": (small, TreeConfig.chain(4, "rejection"), warm),
    "small model, traversal": (small, TreeConfig.static(static, "traversal"), warm),
    "small model, block": (small, TreeConfig.chain(4, "block"), warm),
    "eagle3, top-p": (eagle3_head(target, 512), TreeConfig(3, 4, 16, top_p=0.9), warm),
}
mesh = aot.mesh_for(aot.topology_devices("v5e:1x1"), 2)
for name in CHOSEN:
    head, tree, sampling = works[name]
    work = aot.Workload(target, head, mesh, tree, 2, 128, 128, 128, sampling=sampling)
    report = aot.analyse(work, *aot.compile_program(aot.lower_generate(work)))
    print(json.dumps([name, report.programs, len(report.host), report.copies]), flush=True)
"""


@needs_libtpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "chosen",
    [
        ["small model, rejection", "lookahead"],
        pytest.param(
            ["pld", "medusa", "hydra++", "small model, traversal", "small model, block", "eagle3, top-p"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["few", "rest"],
)
def test_every_method_is_one_program_without_the_host_or_a_copied_cache(repository, chosen):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
                    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", METHODS.replace("CHOSEN", repr(chosen))],
        capture_output=True, text=True, cwd=repository, env=environment, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    assert found == [[name, 1, 0, []] for name in chosen]
