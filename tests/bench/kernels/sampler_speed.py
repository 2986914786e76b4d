"""On one GPU: sampled tokens of the kernels against their plain reference, then the microseconds of one call.

    python tests/bench sampler_speed [--vocab 262144] [--trials 4]

First random batches (few different values in every other row, NaN rows, every mix of parameters): each row is drawn by
the kernels and by the reference on the GPU. Rows may differ only where the two best scores, or the edge of top-p, are
closer than rounding; more than one row in 1,000 fails. Then the time of `Sampler.sample` on bfloat16 logits: `device`
is that of its kernels (CUDA events around many calls), `host` that of launching one. The floor is one read of the
logits at the given bandwidth. The table comes last; exits 1 when tokens differ or a call waited for the device.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from numpy.typing import NDArray

from modelserve_worker.batch import NOT_A_NUMBER, AdmittedRequest
from modelserve_worker.kernels.sampling.sampling import PlainSampling
from modelserve_worker.kernels.sampling.sampling_triton import TritonSampling
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.request import SamplingParams
from modelserve_worker.step.sampler import Sampler

CUDA = torch.device("cuda")
CAP = 30.0
EOS = (1, 106)
ROWS = (1, 8, 32, 64)
BANDWIDTH = 4.3e12  # bytes a second that an H200 reads
TIMED = {
    "greedy": {"temperature": 0.0},
    "top_k 64, top_p 0.95": {"top_k": 64, "top_p": 0.95},
    "full": {},
    "top_p 0.95 (sorted)": {"top_p": 0.95},
}


class Batch:
    """Rows with their own parameters, each in a slot of its own."""

    def __init__(self, sampling: list[SamplingParams], vocab_size: int, *, kernels: bool = True) -> None:
        rows = len(sampling)
        self.sampler = Sampler(
            max_num_seqs=rows, vocab_size=vocab_size, softcap=CAP, parallel=TensorParallel(),
            device=CUDA, backend=TritonSampling() if kernels else PlainSampling(),
        )  # fmt: skip
        self._host: NDArray[np.int32] = np.arange(rows, dtype=np.int32)[::-1].copy()
        self._slots = torch.from_numpy(self._host).cuda()
        self.sampler.admit(
            [AdmittedRequest(int(s), str(s), p, (1, 2, 3), (), EOS) for s, p in zip(self._host, sampling, strict=True)]
        )
        self._counts = np.full(rows, 2, dtype=np.int32)
        self._device_counts = torch.from_numpy(self._counts).cuda()
        self._positions = torch.arange(1000, 1000 + rows, dtype=torch.int32, device=CUDA)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        return self.sampler.sample(
            logits,
            slots=self._slots,
            positions=self._positions,
            output_counts=self._device_counts,
            host_slots=self._host,
        ).tokens


def random_parameters(rng: np.random.Generator) -> SamplingParams:
    special = rng.random()
    return SamplingParams(
        seed=int(rng.integers(0, 1 << 63)),
        max_tokens=9,
        temperature=rng.choice([0.0, 0.5, 1.0, 1.5]).item(),
        top_k=rng.choice([0, 1, 5, 40, 64, 100, 128, 500]).item(),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5]).item(),
        min_p=rng.choice([0.0, 0.0, 0.03]).item(),
        min_tokens=4 if special < 0.2 else 0,
        stop_token_ids=tuple(range(20, 20 + rng.integers(0, 12))),
        repetition_penalty=1.3 if 0.2 < special < 0.3 else 1.0,
        logit_bias=((3, 40.0),) if 0.3 < special < 0.4 else (),
        logprobs=3 if 0.4 < special < 0.5 else None,
    )


def differences(trials: int, vocab_size: int, rows: int) -> tuple[int, int]:
    """(rows whose token differs between kernels and reference, rows compared)."""
    wrong = compared = 0
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        generator = torch.Generator(device=CUDA).manual_seed(seed)
        logits = torch.randn(rows, vocab_size, device=CUDA, generator=generator) * 4
        logits[::2] = logits[::2].round()
        logits = logits.bfloat16()
        logits[3, int(rng.integers(0, vocab_size))] = torch.nan
        sampling = [random_parameters(rng) for _ in range(rows)]
        batch = Batch(sampling, vocab_size)
        batch.sample(logits)  # compiles; what it counts for penalties is reset
        batch.sampler.reset()
        torch.cuda.set_sync_debug_mode("error")
        tokens = batch.sample(logits)
        torch.cuda.set_sync_debug_mode("default")
        fast = tokens.tolist()
        reference = Batch(sampling, vocab_size, kernels=False)
        reference.sampler.reset()
        plain = reference.sample(logits).tolist()
        assert fast[3] == plain[3] == NOT_A_NUMBER, "a NaN row is marked"
        assert min(token for row, token in enumerate(fast) if row != 3) >= 0, "and no other"
        for row, (a, b) in enumerate(zip(fast, plain, strict=True)):
            if a != b:
                print(f"seed {seed} row {row}: kernels {a}, reference {b}, {sampling[row]}")
                wrong += 1
        compared += rows
    return wrong, compared


def microseconds(batch: Batch, logits: torch.Tensor, *, calls: int = 50) -> tuple[float, float]:
    """(device, host) time of one call: medians of 5 rounds; a long first kernel lets the queue fill."""
    for _ in range(3):
        batch.sample(logits)
    device, host = [], []
    for _ in range(5):
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # about 50 ms: launches get ahead of the device
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda.set_sync_debug_mode("error")
        started = time.perf_counter()
        for _ in range(calls):
            batch.sample(logits)
        host.append((time.perf_counter() - started) / calls)
        torch.cuda.set_sync_debug_mode("default")
        end.record()
        torch.cuda.synchronize()
        device.append(begin.elapsed_time(end) / 1e3 / calls)
    return statistics.median(device) * 1e6, statistics.median(host) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=262_144)
    parser.add_argument("--trials", type=int, default=4)
    chosen = parser.parse_args()
    wrong, compared = differences(chosen.trials, chosen.vocab, rows=64)
    wrong_small, compared_small = differences(chosen.trials, 5000, rows=256)
    lines = []
    for rows in ROWS:
        logits = (torch.randn(rows, chosen.vocab, device=CUDA) * 4).bfloat16()
        floor = logits.numel() * 2 / BANDWIDTH * 1e6
        for name, parameters in TIMED.items():
            sampling = [SamplingParams(seed=row, max_tokens=9, **parameters) for row in range(rows)]
            # Sorting takes milliseconds, and hundreds of launches: fewer calls, so that the queue holds them.
            device, host = microseconds(Batch(sampling, chosen.vocab), logits, calls=5 if "sorted" in name else 50)
            lines.append(f"{rows:4d}  {name:22s} {device:9.1f} {host:9.1f} {floor:8.1f}")
    print(f"{wrong + wrong_small} of {compared + compared_small} rows differ between kernels and reference")
    print(f"{torch.cuda.get_device_name()}, vocabulary {chosen.vocab}, bfloat16, microseconds a call")
    print("rows  parameters                device      host    floor", *lines, sep="\n")
    return int((wrong + wrong_small) * 1000 > compared + compared_small)
