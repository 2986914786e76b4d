"""Device memory that a process takes before it has a tensor: CUDA's context, modules, and NCCL in many settings.

    python tests/bench nccl_memory [--width 5376] [--rows 8192] [--only WORD] [--deadline 170]

Two processes on two GPUs for each setting, one after the other. MiB outside of PyTorch's allocator, the larger rank's:
`context` from nothing to the first allocation, `matmul` what cuBLAS adds, `kernels` some of torch's own kernels, then
the communicator (`join`), a sum of one number, a gathering, a broadcast, sums of all sizes of steps from the largest
down; `nccl` is the sum of the last five, which is what a plan calls so. Then microseconds of one sum of 10 KiB and of
the largest rows. The first line says what a context adds for a deeper stack of threads, which is per multiprocessor.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.entries import command

MIB = 1 << 20
STAGES = ("context", "matmul", "kernels", "join", "number", "gather", "broadcast", "sums")
NO_NVLS = {"NCCL_NVLS_ENABLE": "0"}
NO_P2P = {**NO_NVLS, "NCCL_P2P_DISABLE": "1"}


def channels(count: int, **more: str) -> dict[str, str]:
    return {"NCCL_MIN_NCHANNELS": str(count), "NCCL_MAX_NCHANNELS": str(count), **more}


SETTINGS: Mapping[str, Mapping[str, str]] = {
    "p2p default": {},
    "p2p no nvls": NO_NVLS,
    "shm default": NO_P2P,
    "shm 4 channels": NO_P2P | channels(4),
    "shm 2 channels": NO_P2P | channels(2),
    "p2p 8 channels": NO_NVLS | channels(8),
    "p2p 4 channels": NO_NVLS | channels(4),
    "shm 4 channels of 1 MiB": NO_P2P | channels(4, NCCL_BUFFSIZE="1048576"),
    "shm 2 channels of 1 MiB": NO_P2P | channels(2, NCCL_BUFFSIZE="1048576"),
    "p2p 8 channels of 1 MiB": NO_NVLS | channels(8, NCCL_BUFFSIZE="1048576"),
    "shm 4 channels no LL128": NO_P2P | channels(4, NCCL_PROTO="^LL128"),
    "shm 4 channels no cumem": NO_P2P | channels(4, NCCL_CUMEM_ENABLE="0", NCCL_CUMEM_HOST_ENABLE="0"),
    "p2p 8 channels no cumem": NO_NVLS | channels(8, NCCL_CUMEM_ENABLE="0"),
    "p2p 16 channels": NO_NVLS | channels(16),
    "shm 1 channel": NO_P2P | channels(1),
    "p2p 2 channels": NO_NVLS | channels(2),
}


def rank_main(rank: int, folder: Path, width: int, rows: int) -> None:
    """One rank: prints `STAGE BYTES` lines, then `us-small` and `us-large` with microseconds."""
    import torch
    import torch.distributed as dist

    from modelserve_worker.startup.nvml import used_bytes

    device = torch.device("cuda", rank)
    before = used_bytes(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    torch.cuda.set_device(device)
    last = before

    def stage(name: str) -> None:
        nonlocal last
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)
        print(name, outside - last, flush=True)
        last = outside

    torch.empty(1, device=device)
    stage("context")
    weight = torch.zeros(1024, 1024, dtype=torch.bfloat16, device=device)
    for count in (1, 32, 512):
        weight[:count] @ weight
    stage("matmul")
    values = weight.float()
    for each in (values.softmax(-1), values.cumsum(-1), values.sort(-1)[0], values.topk(8)[0], values.argmax(-1)):
        each.sum()
    stage("kernels")
    dist.init_process_group(
        "nccl", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2, device_id=device
    )
    stage("join")
    number = torch.ones(1, dtype=torch.int32, device=device)
    dist.all_reduce(number, op=dist.ReduceOp.MIN)
    stage("number")
    dist.all_gather_into_tensor(
        torch.empty(2, 64, dtype=torch.uint8, device=device), number.view(torch.uint8).repeat(16)
    )
    stage("gather")
    dist.broadcast(number, src=0)
    stage("broadcast")
    residual = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
    for halvings in range(rows.bit_length()):
        dist.all_reduce(residual[: rows >> halvings])
    stage("sums")
    for name, part in (("us-small", residual[:1]), ("us-large", residual)):
        for _ in range(3):
            dist.all_reduce(part)
        torch.cuda.synchronize(device)
        began = time.monotonic()
        for _ in range(20):
            dist.all_reduce(part)
        torch.cuda.synchronize(device)
        print(name, f"{(time.monotonic() - began) / 20 * 1e6:.1f}", flush=True)
    if rank == 0 and os.environ.get("SHOW_STACK"):
        _show_stack(device)
    dist.destroy_process_group()


def _show_stack(device: object) -> None:
    """What a context takes for 4 KiB a thread in place of the default: multiprocessors x threads of each x bytes."""
    import torch
    from cuda.bindings import driver, runtime

    properties = torch.cuda.get_device_properties(device)
    _, default = driver.cuCtxGetLimit(driver.CUlimit.CU_LIMIT_STACK_SIZE)
    threads = properties.multi_processor_count * properties.max_threads_per_multi_processor
    free = torch.cuda.mem_get_info(device)[0]
    runtime.cudaDeviceSetLimit(runtime.cudaLimit.cudaLimitStackSize, 4096)
    torch.zeros(64, device=device).add_(1)
    torch.cuda.synchronize(device)
    taken = free - torch.cuda.mem_get_info(device)[0]
    each, count = properties.max_threads_per_multi_processor, properties.multi_processor_count
    print(
        f"stack {properties.name}: {count} multiprocessors x {each} threads, {default} bytes a thread: "
        f"{threads * default / MIB:.0f} MiB by formula; 4096 bytes take {taken / MIB:.0f} MiB more, "
        f"{threads * (4096 - default) / MIB:.0f} by formula",
        flush=True,
    )


def measured(setting: Mapping[str, str], *, width: int, rows: int, stack: bool, timeout_s: float) -> list[list[str]]:
    """Words of every line that a rank printed, of both ranks. Raises RuntimeError where one failed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    environment |= {"NCCL_SOCKET_IFNAME": "lo", **setting} | ({"SHOW_STACK": "1"} if stack else {})
    sizes = ["--width", str(width), "--rows", str(rows)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                command("nccl_memory", "--rank", str(rank), "--folder", folder, *sizes),
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        lines: list[list[str]] = []
        faults = []
        until = time.monotonic() + timeout_s
        try:
            for rank in ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, errors = rank.communicate(timeout=max(1.0, until - time.monotonic()))
                    lines += [line.split(maxsplit=1) for line in out.splitlines()]
                    faults += [errors[-600:]] if rank.returncode else []
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    faults.append("no end")
                    rank.kill()
                rank.wait()
    if faults:
        raise RuntimeError(faults[0])
    return lines


def row(lines: Sequence[Sequence[str]]) -> str:
    """The larger rank's MiB of every stage, their NCCL's sum, and microseconds."""
    largest: dict[str, float] = {}
    for name, value in lines:
        if name != "stack":
            largest[name] = max(largest.get(name, 0.0), float(value))
    nccl = sum(largest[name] for name in STAGES[3:])
    cells = [f"{largest[name] / MIB:9.1f}" for name in STAGES]
    return " ".join((*cells, f"{nccl / MIB:9.1f}", f"{largest['us-small']:9.1f}", f"{largest['us-large']:9.0f}"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=5376)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--only", default="", metavar="WORD", help="settings with this word in their name")
    parser.add_argument("--deadline", type=float, default=170.0, metavar="SECONDS")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options.rank, options.folder, options.width, options.rows)
        return 0
    print(f"{'MiB':26}" + " ".join(f"{name:>9}" for name in (*STAGES, "nccl", "us 10KiB", "us large")), flush=True)
    ends = time.monotonic() + options.deadline
    failed = 0
    for number, (name, setting) in enumerate(SETTINGS.items()):
        if options.only not in name:
            continue
        left = ends - time.monotonic()
        if left < 5:
            print(f"{name:26}not measured: the time is over", flush=True)
            continue
        try:
            lines = measured(
                setting, width=options.width, rows=options.rows, stack=number == 0, timeout_s=min(60.0, left)
            )
        except RuntimeError as error:
            failed += 1
            print(f"{name:26}failed: {error}", flush=True)
            continue
        print(f"{name:26}{row(lines)}", flush=True)
        for line in lines:
            if line[0] == "stack":
                print(f"  {line[1]}", flush=True)
    return int(bool(failed))
