"""Compile every kernel of the worker for GPUs that need not be there, and compare what it takes with what they have.

    python tests/worker/kernels/compile_kernels.py [--capability 90 ...] [--file KERNELS.py ...] [--match TEXT]

Prints one line per kernel, shape and compute capability, and the problems last; exits with 1 when there are any. The
kernels are the `SPECIMENS` of all modules `modelserve_worker.kernels.*_triton`, or of the files given. Shared memory is
the most that one block may have (`modelserve.sizing.backends.generations`). Registers and spills are those that ptxas
reports. From capability 9.0 on, what a kernel does before it waits for the one before it is read from its PTX
(`dependent_launch` says what it may).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import os
import pkgutil
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

CAPABILITIES = (80, 86, 89, 90, 100, 120)
COMPILED = (80, 89, 90, 100, 120)  # 8.6 has the tiles of 8.9 and the arithmetic of 8.0
MOST_REGISTERS = 255
PROCESSES = 2
DEPENDENT_LAUNCH = 90  # the lowest capability that has it
# How parameters are named that no later kernel of a step writes.
CONSTANT = ("weight", "scalar", "positions", "slots", "starts", "lengths", "firsts", "table", "cos", "sin")


@dataclass(frozen=True)
class Job:
    """Specimen `index` of a module, named by its import name or its file."""

    module: str
    index: int
    name: str
    capability: int


@dataclass(frozen=True)
class Outcome:
    job: Job
    problems: tuple[str, ...]
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0


def kernel_modules() -> list[str]:
    import modelserve_worker.kernels as package

    return [
        f"{package.__name__}.{m.name}" for m in pkgutil.iter_modules(package.__path__) if m.name.endswith("_triton")
    ]


def kernel_module(name: str) -> ModuleType:
    """A module by its import name or, ending in .py, by its file."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a kernel looks its module up to read its source
    spec.loader.exec_module(module)
    return module


def undeclared(name: str) -> bool:
    """True of a module that defines kernels, or parts of them, and has no SPECIMENS to check them by."""
    from triton import JITFunction

    module = kernel_module(name)
    defined = [f for f in vars(module).values() if isinstance(f, JITFunction) and f.__module__ == module.__name__]
    return bool(defined) and not getattr(module, "SPECIMENS", ())


def jobs(modules: list[str], capabilities: list[int], match: str) -> Iterator[Job]:
    for module in modules:
        for index, specimen in enumerate(getattr(kernel_module(module), "SPECIMENS", ())):
            for capability in capabilities:
                if match in specimen.name and specimen.lowest_capability <= capability <= specimen.highest_capability:
                    yield Job(module, index, specimen.name, capability)


def early_work(
    ptx: str, signature: dict[str, str], *, waits: bool, waits_first: bool, settled: frozenset[str]
) -> Iterator[str]:
    """What is wrong before `griddepcontrol.wait`: a way past it, a write, a read of what a kernel may write."""
    body = ptx[ptx.index("\n{") :]
    if "trap;" in body and "st.global" not in body:
        yield "is a trap: Triton has no code for this shape on this GPU, and says so to nobody"
        return
    if ("griddepcontrol" in body) is not waits:
        yield "does not wait for the kernel before it" if waits else "waits, and its capability knows no such thing"
    if not waits or "griddepcontrol.wait" not in body:
        return
    early = body[: body.index("griddepcontrol.wait")]
    if ("griddepcontrol.launch_dependents" in early) is waits_first:
        yield f"lets the next kernel start {'before' if waits_first else 'after'} it waits"
    parameters, pointers = list(signature), {name for name, kind in signature.items() if kind.startswith("*")}
    origins: dict[str, set[str]] = {}  # parameters that a register is computed from
    for statement in early.split(";"):
        code = re.sub(r"//.*", "", statement)
        if barred := re.search(r"\b(bra|ret|exit|call|st\.global|atom|red|cp\.async)\b", code):
            yield f"has {barred[0]} before it waits"
        registers = re.findall(r"%\w+", re.sub(r"@!?%\w+", "", code))
        known = {parameters[int(number)] for number in re.findall(r"_param_(\d+)\]", code)}
        known = known.union(*(origins.get(register, set()) for register in registers[1:]))
        read = known & pointers if "ld.global" in code else set()
        if not_constant := sorted(name for name in read if not name.endswith(CONSTANT) and name not in settled):
            yield f"reads {not_constant} before it waits"
        if registers:
            origins[registers[0]] = origins.get(registers[0], set()) | known


def compile_one(job: Job) -> Outcome:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from modelserve.sizing.backends.generations import generation_of
    from modelserve_worker.execution.kernel_trace import TargetDriver

    triton.runtime.driver.set_active(TargetDriver(job.capability))  # kernels ask it what they are compiled for
    specimen = kernel_module(job.module).SPECIMENS[job.index]
    names = specimen.kernel.arg_names
    if unknown := {*specimen.signature, *specimen.constants} ^ set(names):
        return Outcome(job, (f"the specimen and the kernel do not agree on the parameters {sorted(unknown)}",))
    aligned = [n for n, kind in specimen.signature.items() if kind.startswith("*") or n in specimen.multiples_of_16]
    triton.knobs.nvidia.dump_ptxas_log = True  # printed after every compilation
    log = io.StringIO()
    try:
        source = ASTSource(
            fn=specimen.kernel,
            signature={name: specimen.signature.get(name, "constexpr") for name in names},
            constexprs=specimen.constants,
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(
                source,
                target=GPUTarget("cuda", job.capability, 32),
                options={"num_warps": specimen.num_warps, "num_stages": specimen.num_stages},
            )
    except Exception as error:  # whatever the compiler raises is the finding
        return Outcome(job, (f"does not compile: {type(error).__name__}: {str(error).strip()[-2000:]}",))
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    spilled = re.search(r"(\d+) bytes spill stores", log.getvalue())
    if registers is None or spilled is None:
        return Outcome(job, (f"ptxas reported neither registers nor spills: {log.getvalue()!r}",))
    waits = job.capability >= DEPENDENT_LAUNCH
    passed = {name: specimen.signature[name] for name in names if name in specimen.signature}
    first, settled = specimen.waits_first, specimen.settled
    early = early_work(compiled.asm["ptx"], passed, waits=waits, waits_first=first, settled=settled)
    used, stored, shared = int(registers[1]), int(spilled[1]), compiled.metadata.shared
    most = generation_of(job.capability).shared_bytes
    problems = (
        (used > MOST_REGISTERS, f"{used} registers, of {MOST_REGISTERS}"),
        (stored > specimen.spilled_bytes, f"{stored} bytes of spill stores, of {specimen.spilled_bytes} accepted"),
        (shared > most, f"{shared} bytes of shared memory, of {most}"),
    )
    found = (*(text for wrong, text in problems if wrong), *early)
    return Outcome(job, found, used, stored, shared)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", choices=CAPABILITIES, default=list(COMPILED))
    parser.add_argument("--file", nargs="+", help="modules with SPECIMENS, instead of the worker's")
    parser.add_argument("--match", default="", help="only specimens whose name contains this")
    chosen = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # an interpreted kernel has nothing to compile
    modules = chosen.file or kernel_modules()
    todo = list(jobs(modules, chosen.capability, chosen.match))
    problems = [f"{name} has kernels and declares no SPECIMENS" for name in modules if undeclared(name)]
    problems += [] if todo else ["no kernel was found"]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        outcomes = []
        # A process compiles for one capability: Triton keeps how fp8 is converted from the first that it compiled for.
        for capability in chosen.capability:
            with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
                for outcome in pool.map(compile_one, (job for job in todo if job.capability == capability)):
                    outcomes.append(outcome)
                    used = f"{outcome.registers:3d} registers {outcome.spilled_bytes:5d} B spilled"
                    print(f"sm_{capability} {used} {outcome.shared_bytes:6d} B shared  {outcome.job.name}")
    problems += [f"sm_{o.job.capability} {o.job.name}: {text}" for o in outcomes for text in o.problems]
    print(f"{len(outcomes)} compiled, {len(problems)} problems", *problems, sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
