"""Host memory that the grammars of answers may take in the engine's process. Bytes.

The pod's memory request contains GRAMMARS_BYTES, and an answer whose grammar would take more than its share ends, so
clients cannot make a worker larger than its plan.
"""

from __future__ import annotations

from modelserve.sizing.memory import CPU_HEADROOM
from modelserve.units import GIB

GRAMMARS_BYTES = GIB
"""States of the lexers of all answers that are followed at a time; what else a grammar has is a few kilobytes."""

LEXER_STATE_BYTES = 512
"""Of one state. Measured 300 for a string of at most 20,000 characters over a vocabulary of 262,144 and 130 for nested
counts, by the resident set until 50,000 states are there; alphabets of many scripts take more."""

MOST_LEXER_STATES = 50_000
LEAST_LEXER_STATES = 8_192  # a string of 3,000 counted characters


def lexer_states(*, max_num_seqs: int, cpu_memory_bytes: int | None) -> int:
    """States that one answer's grammar may have. A counted character of a string takes two or three.

    On the CPU, whose memory the plan divides, all of them share a quarter of the plan's headroom, beside open bodies'
    half, but each has LEAST_LEXER_STATES.
    """
    shared = GRAMMARS_BYTES
    if cpu_memory_bytes is not None:
        shared = min(shared, int(cpu_memory_bytes * CPU_HEADROOM) // 4)
    return max(LEAST_LEXER_STATES, min(MOST_LEXER_STATES, shared // (max_num_seqs * LEXER_STATE_BYTES)))
