"""Compile every kernel of the worker for GPUs that need not be there, and compare what it takes with what they have.

    python tests/worker/kernels/compile_kernels.py [--capability 90 ...] [--file KERNELS.py] [--match TEXT] [--trust]

Prints one row per kernel, shape and compute capability (`golden_code` says what is in it), and the problems last; exits
with 1 when there are any. What is compiled is what models launch (`traced_launches`), kernels in CUDA C++ included, or
what `launch_all` of the file given does; a kernel in `modelserve_worker.kernels.*_triton` that none of them launches is
a problem too. Shared memory is the most that one block may have (`modelserve.sizing.backends.generations`). Registers
and spills are those that ptxas reports. From capability 9.0 on, what a kernel of Triton does before it waits for the
one before it is read from its PTX (`dependent_launch` says what it may). --trust: a launch is not compiled where
`golden_code.tsv` has a row of the same sources and compilers, but for some drawn by chance; rows are held to the limits
all the same. Then what is launched is found for one generation, drawn by chance, too, unless some are named, Hopper in
every second run: finding it takes a minute and a half of CPU a generation.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import io
import os
import pkgutil
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from golden_code import SAMPLED, Golden, Row, committed
from machine_code import code_hash, compilers, source_hash
from traced_launches import (
    CASES,
    Source,
    Traced,
    kernel_module,
    launches_of,
    launches_of_file,
    never_launched,
    once_each,
)

from modelserve.sizing.backends.generations import generation_of

CAPABILITIES = (80, 86, 89, 90, 100, 120)
MEASURED = 90  # which has most kernels
COMPILED = (80, 89, 90, 100, 120)  # 8.6 has the tiles of 8.9 and the arithmetic of 8.0
MOST_REGISTERS = 255
PROCESSES = 2
FEW, TRIED_ALONE = 16, 2
DEPENDENT_LAUNCH = 90  # the lowest capability that has it
# How parameters are named that no later kernel of a step writes.
CONSTANT = ("weight", "scalar", "positions", "slots", "starts", "lengths", "firsts", "table", "cos", "sin")
WAITS_FIRST = ("embed",)  # the next kernel starts when this one has waited, not before
SETTLED = {
    "add_branches": ("residual", "dense", "choice.weights", "choice.experts")
}  # where the launch's constant SETTLED is true
# Bytes of spill stores that are accepted, by how a launch's name begins: accumulators of 512 columns fill registers,
# and what is spilled are numbers of the layout, once per tile. How many follows from constants that have nothing to do
# with it, as from the room for chunks. Sliding chunks of fewer warps spill more and take two thirds of the time.
SPILLS = (
    ("split_decode_v_only_packed(", 896),
    ("split_decode_v_only(", 384),
    ("split_decode_packed(", 8),
    ("global_chunk(", 896),
    ("global_chunk_v_only(", 448),
    ("sliding_chunk(", 704),
    ("int4_product(", 16),
    ("int4_expert_products(", 16),
    ("int8_product(", 16),
    ("nvfp4_expert_products(", 16),
    ("rank_sum(WIDTH=2048,RANKS=2,NORMS=0; sm_80", 8),
)


@dataclass(frozen=True)
class Outcome:
    """`row`: None where nothing was compiled."""

    launch: Traced | Source
    problems: tuple[str, ...]
    row: Row | None = None


def kernel_modules() -> list[str]:
    import modelserve_worker.kernels as package

    modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [module.name for module in modules if module.name.endswith("_triton")]


def early_work(ptx: str, launch: Traced, *, waits: bool) -> Iterator[str]:
    """What is wrong before `griddepcontrol.wait`: a way past it, a write, a read of what a kernel may write."""
    body = ptx[ptx.index("\n{") :]
    if "trap;" in body and "st.global" not in body:
        yield "is a trap: Triton has no code for this shape on this GPU, and says so to nobody"
        return
    if ("griddepcontrol" in body) is not waits:
        yield "does not wait for the kernel before it" if waits else "waits, and its capability knows no such thing"
    if not waits or "griddepcontrol.wait" not in body:
        return
    if launch.constants.get("BESIDE"):  # its last program alone waits
        return
    signature, waits_first = launch.types, launch.kernel in WAITS_FIRST
    settled = SETTLED.get(launch.kernel, ()) if launch.constants.get("SETTLED") else ()
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


def compile_one(launch: Traced | Source, capability: int, known: Row | None = None) -> Outcome:
    """`known`: its row, which is believed where it is of the same sources."""
    compiled = compiled_by_nvrtc if isinstance(launch, Source) else compiled_by_triton
    source = source_hash(launch)
    if known is not None and known.source == source:
        return Outcome(launch, tuple(beyond_limits(launch, known, capability)), known)
    try:
        cubin, log, shared, early = compiled(launch, capability)
    except Exception as error:  # whatever the compiler raises is the finding
        return Outcome(launch, (f"does not compile: {type(error).__name__}: {str(error).strip()[-2000:]}",))
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    if registers is None or spilled is None:
        return Outcome(launch, (f"ptxas reported neither registers nor spills: {log!r}",))
    sizes = int(registers[1]), int(spilled[1]), shared
    row = Row(f"sm_{capability}", launch.key, *sizes, code_hash(cubin), source)
    return Outcome(launch, (*beyond_limits(launch, row, capability), *early), row)


def beyond_limits(launch: Traced | Source, row: Row, capability: int) -> Iterator[str]:
    most, accepted = generation_of(capability).shared_bytes, accepted_spills(launch)
    if row.registers > MOST_REGISTERS:
        yield f"{row.registers} registers, of {MOST_REGISTERS}"
    if row.spilled_bytes > accepted:
        yield f"{row.spilled_bytes} bytes of spill stores, of {accepted} accepted"
    if row.shared_bytes > most:
        yield f"{row.shared_bytes} bytes of shared memory, of {most}"


Compiled = tuple[bytes, str, int, Iterable[str]]  # cubin, what ptxas says, bytes of shared memory, early work


def compiled_by_triton(launch: Traced, capability: int) -> Compiled:
    import triton

    from modelserve_worker.kernels.compiling.bundles import preload
    from modelserve_worker.startup.kernel_trace import TargetDriver

    triton.runtime.driver.set_active(TargetDriver(capability))  # kernels ask it what they are compiled for
    triton.knobs.nvidia.dump_ptxas_log = True  # printed after every compilation
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = preload(getattr(kernel_module(launch.module), launch.kernel), launch.specialization)
    early = early_work(compiled.asm["ptx"], launch, waits=capability >= DEPENDENT_LAUNCH)
    return compiled.asm["cubin"], log.getvalue(), compiled.metadata.shared, early


def compiled_by_nvrtc(launch: Source, _capability: int) -> Compiled:
    from modelserve_worker.kernels.compiling.cuda_kernel import compiled

    return *compiled(launch.source), launch.source.shared_bytes, ()


def accepted_spills(launch: Traced | Source) -> int:
    return next((most for name, most in SPILLS if launch.name.startswith(name)), 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", choices=CAPABILITIES)
    parser.add_argument("--file", help="a module with launch_all, instead of the worker's")
    parser.add_argument("--match", default="", help="only launches whose name contains this")
    parser.add_argument("--trust", action="store_true", help="rows that are committed")
    chosen = parser.parse_args()
    print(*nothing_compiled().head(), sep="\n")
    capabilities = chosen.capability or (trusting_capabilities() if chosen.trust else COMPILED)
    outcomes, problems = compile_all(
        capabilities, chosen.file, chosen.match, trusted=committed() if chosen.trust else None, sampled=SAMPLED,
        heard=lambda row: print(row),
    )  # fmt: skip
    print(f"{len(outcomes)} compiled, {len(problems)} problems", *problems, sep="\n")
    return bool(problems)


def trusting_capabilities() -> tuple[int]:
    """Hopper in every second run, else one of the others."""
    others = [each for each in COMPILED if each != MEASURED]
    return (random.choice([MEASURED] * len(others) + others),)


def compile_all(
    capabilities: Sequence[int],
    file: str | None = None,
    match: str = "",
    *,
    trusted: Golden | None = None,
    sampled: int = 0,
    heard: Callable[[Row], object] = lambda _: None,
) -> tuple[list[Outcome], list[str]]:
    """What became of every launch, and the problems. Rows of `trusted` are believed where sources, compilers and checks
    are the same, but for one in `sampled`. `heard`: hears of each row at once."""
    here = nothing_compiled()
    if trusted is not None and (trusted.compilers, trusted.check) != (here.compilers, here.check):
        trusted = None
    before = {row.launch: row for row in committed().rows} if file is None else {}
    believed = {
        row.launch: row for row in (trusted.rows if trusted else ()) if not sampled or random.randrange(sampled)
    }
    os.environ.pop("TRITON_INTERPRET", None)  # an interpreted kernel has nothing to compile
    outcomes, launched, problems = list[Outcome](), list[Traced](), list[str]()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        # A process compiles for one capability: Triton keeps how fp8 is converted from the first that it compiled for.
        for capability in capabilities:
            with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
                if file is None:
                    traces = pool.map(launches_of, CASES, [capability] * len(CASES))
                else:
                    traces = pool.map(launches_of_file, [file], [capability])
                found = once_each(launch for trace in traces for launch in trace)
                launched += (launch for launch in found if isinstance(launch, Traced))
                todo = [launch for launch in found if match in launch.name]
                rows = [believed.get((f"sm_{capability}", launch.key)) for launch in todo]
                compiled = list(pool.map(compile_one, todo, [capability] * len(todo), rows))
            for outcome in as_before(compiled, before, capability):
                outcomes.append(outcome)
                problems += (f"sm_{capability} {outcome.launch.name}: {text}" for text in outcome.problems)
                if outcome.row is not None:
                    heard(outcome.row)
    if not outcomes:
        problems.insert(0, "no launch was found")
    # The rows that are trusted say what is launched on generations that were not looked at.
    others = (
        [row for row in trusted.rows if row.target not in {f"sm_{each}" for each in capabilities}] if trusted else []
    )
    if {*COMPILED} <= {*capabilities} or others or file is not None:
        modules, elsewhere = kernel_modules() if file is None else [file], {row.name.split("(")[0] for row in others}
        unused = never_launched(modules, launched, elsewhere=elsewhere)
        problems[:0] = [f"{name} is launched by nobody" for name in unused]
    return outcomes, problems


def as_before(outcomes: list[Outcome], before: dict[tuple[str, str], Row], capability: int) -> list[Outcome]:
    """`outcomes`, where few are of other code than their row with those that a process of their own compiles as it was.

    Which of two codes Triton makes of a source can depend on what its process compiled before, and on addresses.
    """

    def other(outcome: Outcome) -> bool:
        row = outcome.row
        return row is not None and not row.is_of(before.get(row.launch, row))

    for _ in range(TRIED_ALONE):
        others = [outcome for outcome in outcomes if other(outcome)]
        if not 0 < len(others) <= FEW:
            break
        with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
            alone = pool.map(compile_alone, [each.launch for each in others], [capability] * len(others))
            settled = {again.launch: again for again in alone if again.row is not None and not other(again)}
        outcomes = [settled.get(outcome.launch, outcome) for outcome in outcomes]
    return outcomes


def compile_alone(launch: Traced | Source, capability: int) -> Outcome:
    import triton

    triton.knobs.compilation.always_compile = True  # and not what another process has put into the cache
    return compile_one(launch, capability)


def nothing_compiled() -> Golden:
    """Of these compilers and checks, no row."""
    checks = inspect.getsource(early_work), DEPENDENT_LAUNCH, CONSTANT, WAITS_FIRST, SETTLED
    return Golden(compilers(), (), hashlib.sha256(repr(checks).encode()).hexdigest()[:16])


if __name__ == "__main__":
    sys.exit(main())
