"""What the grammars of all answers may take together is in the pod's request, and one answer has its share of it."""

from __future__ import annotations

from modelserve.sizing.host.grammars import (
    GRAMMARS_BYTES,
    LEAST_LEXER_STATES,
    LEXER_STATE_BYTES,
    MOST_LEXER_STATES,
    lexer_states,
)


def test_all_grammars_together_stay_within_their_term() -> None:
    for sequences in (1, 16, 64, 100, 256):
        states = lexer_states(max_num_seqs=sequences, cpu_memory_bytes=None)
        assert sequences * states * LEXER_STATE_BYTES <= GRAMMARS_BYTES
        assert states <= MOST_LEXER_STATES
    assert lexer_states(max_num_seqs=32, cpu_memory_bytes=None) == MOST_LEXER_STATES


def test_a_cpu_has_less_and_never_too_few_for_a_paragraph() -> None:
    assert lexer_states(max_num_seqs=4, cpu_memory_bytes=4 << 30) > LEAST_LEXER_STATES
    assert lexer_states(max_num_seqs=64, cpu_memory_bytes=1 << 30) == LEAST_LEXER_STATES
