"""What the front end of a worker may hold in host memory for its clients, by name. Bytes.

The worker refuses (429) what would exceed OPEN_BODIES_BYTES, and the pod's memory request contains all of it, so
clients cannot make a worker larger than its plan.
"""

from __future__ import annotations

from modelserve.sizing.memory import CPU_HEADROOM
from modelserve.units import MIB

OPEN_BODIES_BYTES = 512 * MIB
"""Bodies that are being read, the prompts of open requests, and log probabilities of answers until they are sent."""

HELD_BYTES_PER_TOKEN = 8
"""Of a prompt while its request is open: a word in an array, and once more until it is written to the engine."""

HELD_BYTES_PER_LOGPROB = 400
"""Of one token's log probability in an answer that is sent whole: a tuple, an id and a float, and what its JSON is made
of and takes, which in the end is there twice."""

PREPARATION_BYTES = 512 * MIB
"""One large body while it is parsed, rendered and encoded; one at a time. Most of it is the tokenizer's: about 130
bytes per token of a piece, which is encoded at once where it has at most six bytes per token of the context."""

KNOWN_TEXTS_BYTES = 32 * MIB
"""Texts of earlier prompts with their token ids, about 9 bytes a token: of 60 sessions of 60,000 tokens."""


def open_bodies_bytes(cpu_memory_bytes: int | None) -> int:
    """What a worker lets open requests hold. On the CPU, whose memory the plan divides: half of the plan's headroom."""
    if cpu_memory_bytes is None:
        return OPEN_BODIES_BYTES
    return min(OPEN_BODIES_BYTES, int(cpu_memory_bytes * CPU_HEADROOM) // 2)
