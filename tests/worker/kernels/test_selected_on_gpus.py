"""One command runs on a GPU whatever compares kernels there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).parent
FORMATS = ("int8_linear", "nvfp4_linear", "int4_linear", "fp8_linear", "linear_rows_sm90", "attention_kernels")
COLLECT = """
import sys, torch, pytest
torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda *_: (9, 0)
sys.exit(pytest.main(["-n0", "-pno:cacheprovider", "--collect-only", "-q", "-m", "gpu", *sys.argv[1:]]))
"""


def test_comparisons_of_every_format_are_selected_where_there_is_a_gpu() -> None:
    files = [f"{KERNELS}/test_{name}.py" for name in FORMATS]
    done = subprocess.run([sys.executable, "-c", COLLECT, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, test in zip(FORMATS[:2], ("test_products_equal_float64", "test_products_equal_float64"), strict=True):
        assert f"test_{name}.py::{test}" in done.stdout
    assert [name for name in FORMATS if f"test_{name}.py::" not in done.stdout] == []
