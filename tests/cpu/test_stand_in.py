"""The `sgl_kernel` stand-in: every name SGLang needs on CPU, no AMX marker, clear errors for the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import torch, sgl_kernel, sgl_kernel.mamba, sgl_kernel.speculative
from sgl_kernel import kvcacheio
assert "stand_in" in sgl_kernel.__file__
for op in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu", "fused_sigmoid_mul_cpu",
           "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
           "fused_qkvzba_split_reshape_cat_contiguous_cpu"):
    assert callable(getattr(torch.ops.sgl_kernel, op)), op
# SGLang takes every AMX branch if this op exists, also on a CPU that has AMX.
assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
for absent in (sgl_kernel.verify_tree_greedy_cpu, kvcacheio.transfer_kv_all_layer):
    try:
        absent()
    except NotImplementedError as error:
        assert "has no CPU form" in str(error)
    else:
        raise AssertionError("an absent op must raise")
"""


def test_stand_in_in_a_fresh_process():
    """In a process of its own: the stand-in must come before the real package on the path."""
    path = f"{ROOT / 'sglang_histate' / 'cpu' / 'stand_in'}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
