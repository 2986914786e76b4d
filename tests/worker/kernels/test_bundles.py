"""Bundles of arguments: what a launch was noted as is compiled elsewhere to the kernel that the launch itself is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from modelserve_worker.kernels.compiling.bundles import bundle, constant, member_names, preload  # noqa: F401 - in NOTED
from modelserve_worker.kernels.compiling.dependent_launch import launch, launch_dependents, wait_for_prerequisites


@bundle
class Rows(NamedTuple):
    elements: Any
    others: Any  # or None
    stride: int
    WIDTH: tl.constexpr
    DOUBLED: tl.constexpr


@triton.jit
def total(rows: Rows, output, BLOCK: tl.constexpr):
    launch_dependents()
    wait_for_prerequisites()
    column = tl.arange(0, BLOCK)
    values = tl.load(rows.elements + tl.program_id(0) * rows.stride + column, mask=column < rows.WIDTH, other=0.0)
    if rows.others is not None:
        values += tl.load(rows.others + column, mask=column < rows.WIDTH, other=0.0)
    tl.store(output + tl.program_id(0), tl.sum(values) * (2.0 if rows.DOUBLED else 1.0))


def test_an_interpreted_kernel_reads_members_by_name() -> None:
    values, output = torch.arange(24.0).view(3, 8), torch.empty(3)
    for others, doubled in ((None, True), (torch.ones(8), False)):
        launch(total, (3,), Rows(values, others, 8, constant(6), constant(doubled)), output, BLOCK=8)
        expected = values[:, :6].sum(1) * (2 if doubled else 1) + (0 if others is None else 6)
        assert torch.equal(output, expected)


def test_a_member_has_no_name_that_the_compiler_reads_as_its_own() -> None:
    with pytest.raises(AssertionError, match="Triton's tuples have that themselves"):
        bundle(NamedTuple("Hiding", [("values", Any)]))


def test_a_constant_is_one_object_a_value_and_numbers_are_not_truths() -> None:
    assert constant(8) is constant(8)
    assert constant(1) is not constant(True)
    assert constant(1).value is not True


NOTED = """
import json, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
sys.path.insert(0, sys.argv[1])
import test_bundles as own
from modelserve_worker.startup.kernel_trace import TargetDriver, launches_go_to
found = []
with launches_go_to(found.append, 90), FakeTensorMode():
    values = torch.empty(3, 8, device="cuda")
    rows = own.Rows(values, None, 8, own.constant(6), own.constant(True))
    own.launch(own.total, (3,), rows, torch.empty(3, device="cuda"), BLOCK=8)
own.triton.runtime.driver.set_active(TargetDriver(90))
again = own.preload(own.total, found[0].specialization)
class Aligned:
    dtype = torch.float32
    def data_ptr(self): return 0
rows = own.Rows(Aligned(), None, 8, own.constant(6), own.constant(True))
itself = own.total.run(rows, Aligned(), grid=(3,), warmup=True, BLOCK=8, launch_pdl=True)
print(json.dumps([own.member_names(own.total), again.hash, itself.hash, itself is again]))
"""


def test_a_noted_launch_is_compiled_to_the_kernel_of_the_launch_itself() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", NOTED, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    names, again, itself, same = json.loads(done.stdout.splitlines()[-1])
    assert names == {"rows": list(Rows._fields)}
    assert again == itself
    assert same, "the launch finds what was compiled ahead in memory, too"
