"""What ranks of a tensor-parallel group send each other through peer memory, and the buffers for it."""

from __future__ import annotations

from dataclasses import dataclass

from modelserve.model.architecture import ModelArchitecture
from modelserve.units import MIB

PEER_BUFFER_BYTES = (
    8 * MIB
)  # of small sums, on every rank: two in flight, of all ranks, twice as wide as their elements
WIDTH_MULTIPLE = 256  # elements of a row: each thread takes 8, and 32 threads go together
MOST_WIDTH = 8192
FLAG_BYTES = 4
_ELEMENT_BYTES = 2  # bfloat16 alone


def peer_message_bytes(tensor_parallel_size: int) -> int:
    """Most bytes of one small sum over so many ranks; larger ones go by rows, or are NCCL's."""
    return PEER_BUFFER_BYTES // (4 * tensor_parallel_size)


@dataclass(frozen=True)
class PeerRowsLayout:
    """The buffer of sums by rows on every rank: normed rows, rows received from each rank, and flags of both."""

    rows: int
    width: int  # elements
    ranks: int

    @property
    def share(self) -> int:
        """Most rows that one rank owns."""
        return -(-self.rows // self.ranks)

    @property
    def inbox(self) -> int:
        return self.rows * self.width * _ELEMENT_BYTES

    @property
    def normed_flags(self) -> int:
        return self.inbox + self.ranks * self.share * self.width * _ELEMENT_BYTES

    @property
    def inbox_flags(self) -> int:
        return self.normed_flags + self.rows * FLAG_BYTES

    @property
    def total_bytes(self) -> int:
        return self.inbox_flags + self.ranks * self.share * FLAG_BYTES


def sums_by_rows(architecture: ModelArchitecture) -> bool:
    """Whether a rank may keep its own rows of the residual alone: not where experts are chosen by it, or per-layer
    inputs are made from it. Rows must have whole words for every thread, too.
    """
    width = architecture.hidden_size
    whole = architecture.num_experts or architecture.hidden_size_per_layer_input
    return not whole and width % WIDTH_MULTIPLE == 0 and width <= MOST_WIDTH


def peer_rows_layout(architecture: ModelArchitecture, *, tensor_parallel_size: int, rows: int) -> PeerRowsLayout | None:
    """For steps of at most `rows` rows. None for one rank, and where sums do not go by rows: NCCL adds large ones."""
    if tensor_parallel_size == 1 or not sums_by_rows(architecture):
        return None
    return PeerRowsLayout(rows, architecture.hidden_size, tensor_parallel_size)


def peer_bytes(architecture: ModelArchitecture, *, tensor_parallel_size: int, rows: int) -> int:
    """Bytes of all buffers that other ranks write into, of one rank."""
    if tensor_parallel_size == 1:
        return 0
    layout = peer_rows_layout(architecture, tensor_parallel_size=tensor_parallel_size, rows=rows)
    return PEER_BUFFER_BYTES + (0 if layout is None else layout.total_bytes)
