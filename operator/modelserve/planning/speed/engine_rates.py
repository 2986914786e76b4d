"""What our engine reaches of a GPU, per generation (compute capability): the constants of every expected speed.

One GPU was measured, the H200 (9.0), at its own clocks with kernels and captured steps; docs/benchmarks.md has the
figures and the commands, docs/sizing.md says which of them each constant comes from. Of the other generations nothing
was measured: their kernels are Triton's and cuBLAS's, where Hopper has some of its own (attention of prompts, products
of few rows) and starts each kernel while the one before it ends. So their attention, reads and launches are what the
same H200 did before it had those, and their other shares are the H200's. Shares are of the datasheet's figures
(modelserve.hardware).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Capability = tuple[int, int]
HOPPER: Capability = (9, 0)


@dataclass(frozen=True)
class EngineRates:
    """Shares of bandwidth and of the dense bfloat16 rate, 0 to 1, and seconds."""

    generation: str
    measured: bool  # on a GPU of this generation; else assumed from Hopper
    weight_read: float = 0.925  # of bandwidth: decode of 31B and E4B at one request, solved for this and launch_seconds
    expert_read: float = 0.84  # of bandwidth: grouped products of 26B-A4B at 64 to 512 rows, 368 to 397 us a layer
    int4_read: float = 0.71  # of bandwidth: the same for INT4 matrices, which are unpacked on the way
    fp8_read: float = 0.82  # of bandwidth: the same for FP8 matrices, and not measured for INT8, which unpack in less
    cache_read: float = 0.75  # of bandwidth: decode attention in batches by Triton's kernels, 3.5 to 3.8 of 4.8 TB/s
    streamed_read: float = 0.88  # the same by Hopper's, which goes from row to row: 4.0 to 4.4 TB/s
    v_only_read: float = 0.7  # the same by Hopper's for rows that hold V alone: 2.9 to 3.8 TB/s
    turned_8_bit_read: float = 0.28  # of bandwidth: 8-bit rows of V-only layers, decoded and turned in registers
    elementwise: float = 0.77  # of bandwidth: norms and GeGLU at 8,192 rows, 80 to 94 % of 4.3 TB/s
    linear: float = 0.71  # of the dense rate: TTFT of 31B at 8,192 tokens; 740 of 989 TFLOP/s by kernels, 790 alone
    int4_linear: float = 0.71  # the same of INT4 matrices, unpacked on the way: 690 to 755 TFLOP/s from 256 rows on
    int8_linear: float = 0.66  # `linear`, and five bytes moved an element for 8,192 rows; not measured
    expert_linear: float = 0.68  # of the dense rate: experts of 8,192 rows in a step, 37.9 ms with what does not hide
    fp8_linear: float = 1.2  # the same for products of e4m3, of the bfloat16 rate: TTFT of 31B in FP8
    exposed: float = 0.2  # of the shorter of reading weights and multiplying, what does not hide behind the longer
    expert_exposed: float = 0.5  # the same of experts: alone 489 and 823 us a layer at 2,048 and 4,096 rows
    attention_v_only: float = 0.6  # of the dense rate: chunks over global layers that store V alone
    attention_kv: float = 0.46  # the same where K and V are stored
    attention_sliding: float = 0.5  # chunks over a sliding window: 484 to 542 TFLOP/s by themselves
    launch_seconds: float = 1.15e-6  # per kernel of a captured step: its start and the gap before it
    # What a kernel takes longer at 32 rows and more than at one: steps of 8 and 32 requests of E4B, 3.12 and 4.25 ms.
    filled_launch_seconds: float = 1.1e-6
    # Per product that is the library's: a full end and start on both of its sides. 64 decodes of 31B, 17.5 ms, when all
    # of more than 32 rows were. Of steps without prompts; of others it is in `linear` and `mixed_layer_seconds`.
    library_seconds: float = 3e-6
    # Per product of 65 to 128 rows by Hopper's own kernel, whose tiles then have 128: a layer of E4B 62.4 and 69.1 us.
    wide_seconds: float = 1.1e-6
    draft_launch_seconds: float = 1.5e-6  # per kernel of a draft: small ones, each of which waits for the one before
    mixed_layer_seconds: float = 50e-6  # per layer of a step with decodes and prompts: both attentions over few rows
    expert_layer_seconds: float = 4e-6  # per layer of experts, whose products read nothing before rows have chosen
    # Of a step with drafts, per layer, and per layer and row: attention over several rows of a request. What steps that
    # verify 5 to 72 rows of 31B and E4B took longer than as many requests of one row would.
    drafted_layer_seconds: float = 7e-6
    drafted_row_seconds: float = 0.3e-6
    peer_sum_seconds: float = 2.5e-6  # what the norm behind a small sum takes longer with the sum, over NVLink
    all_reduce_seconds: float = 17e-6  # of a small sum between GPUs that do not reach each other's memory
    nvlink: float = 0.6  # of NVLink's rate in NCCL's large sums: 271 of 450 GB/s; PCIe's figure is what it reaches
    host_copy: float = 50e9  # bytes/s out of pinned host memory over PCIe 5.0 x16; not measured
    peer_link: float = 0.9  # the same in sums by rows: 406 GB/s beside the norms of a rank's share


# Profile exact, of an H200: steps of 1 to 144 rows of 31B, one row of E4B and 26B-A4B, a prompt of 8,192 of E4B, and
# products of a layer of 31B by themselves. Its products hide little behind reading; its router takes one program for
# all inputs of few rows; several rows of a request take as much again for each other in attention.
EXACT_LINEAR, EXACT_READ, EXACT_EXPOSED = 0.66, 0.78, 0.8
EXACT_EXPERT_LAYER_SECONDS, EXACT_DRAFTED_ROW_SECONDS = 95e-6, 2.0e-6

_HOPPER = EngineRates("Hopper", measured=True)
# Memory is slower there, by multiprocessor, than an H200 unpacks INT4 in Triton: reading binds, as in other formats. Of
# more rows the same H200 took 1,034 to 3,143 us a layer of 31B at 512 to 2,048 rows, 0.47 to 0.62 of its dense rate.
_TRITON = replace(
    _HOPPER, measured=False, attention_v_only=0.28, attention_kv=0.18, attention_sliding=0.29, weight_read=0.87,
    int4_read=0.87, fp8_read=0.87, int4_linear=0.55, int8_linear=0.55, launch_seconds=3.0e-6,
    draft_launch_seconds=3.0e-6, library_seconds=0.0, wide_seconds=0.0,
)  # fmt: skip
_PCIE_4 = 25e9
_NO_E4M3 = replace(_TRITON, fp8_linear=_TRITON.linear, host_copy=_PCIE_4)  # inputs stay bfloat16, weights are unpacked
GENERATIONS: dict[Capability, EngineRates] = {
    (0, 0): replace(_NO_E4M3, generation="CPU"),
    (7, 5): replace(_NO_E4M3, generation="Turing"),
    (8, 0): replace(_NO_E4M3, generation="Ampere"),
    (8, 6): replace(_NO_E4M3, generation="Ampere"),
    (8, 9): replace(_TRITON, generation="Ada", host_copy=_PCIE_4),
    HOPPER: _HOPPER,
    (10, 0): replace(_TRITON, generation="Blackwell"),
    (12, 0): replace(_TRITON, generation="Blackwell"),
}


def engine_rates(capability: Capability, *, exact: bool = False) -> EngineRates:
    """The constants of a generation; of one that is not listed, those of the newest listed one before it.

    `exact`: under that profile, where Triton's kernels alone compute, FP8 in bfloat16; measured on Hopper in bfloat16.
    """
    known = GENERATIONS.get(capability)
    if known is None:
        known = GENERATIONS[max(each for each in GENERATIONS if each <= capability)]
    if not exact:
        return known
    reads = {name: getattr(_TRITON, name) for name in ("attention_v_only", "attention_kv", "attention_sliding")}
    return replace(
        known, measured=False, linear=EXACT_LINEAR, fp8_linear=EXACT_LINEAR, weight_read=EXACT_READ,
        int4_read=min(known.int4_read, EXACT_READ), fp8_read=EXACT_READ, peer_sum_seconds=known.all_reduce_seconds,
        exposed=EXACT_EXPOSED, expert_layer_seconds=EXACT_EXPERT_LAYER_SECONDS, drafted_layer_seconds=0.0,
        drafted_row_seconds=EXACT_DRAFTED_ROW_SECONDS,
        launch_seconds=_TRITON.launch_seconds, library_seconds=0.0, wide_seconds=0.0, **reads,
    )  # fmt: skip
