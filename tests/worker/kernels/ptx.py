"""The few PTX instructions that inline assembly of the kernels uses, computed on arrays of 32-bit registers.

The interpreter runs kernels without their assembly; this runs the assembly without a GPU.
"""

from __future__ import annotations

import re

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def run(assembly: str, inputs: list[Words], *, outputs: int) -> list[Words]:
    """Registers $0 to $outputs - 1 after the block; the next ones hold the inputs. Raises KeyError for the unknown."""
    registers: dict[str, Words] = {f"${outputs + i}": value.astype(np.uint32) for i, value in enumerate(inputs)}
    shape = inputs[0].shape

    def value(operand: str) -> Words:
        if re.fullmatch(r"0x[0-9a-f]+|\d+", operand):
            return np.full(shape, int(operand, 0), np.uint32)
        return registers[operand]

    for statement in assembly.strip("{} \n").split(";"):
        if not (words := statement.replace(",", " ").split()) or words[0] == ".reg":
            continue
        operation, target, *operands = words
        registers[target] = OPERATIONS[operation](*map(value, operands))
    return [registers[f"${i}"] for i in range(outputs)]


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    both = b.astype(np.uint64) << 32 | a
    result = np.zeros_like(a)
    for octet in range(4):
        chosen = selector >> 4 * octet & 15
        assert (chosen < 8).all(), "the sign mode is not known here"
        result |= ((both >> (8 * chosen).astype(np.uint64)).astype(np.uint32) & 0xFF) << np.uint32(8 * octet)
    return result


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    result = np.zeros_like(a)
    for bits in range(8):
        if (table[0] if table.ndim else table) >> bits & 1:
            result |= (a if bits & 4 else ~a) & (b if bits & 2 else ~b) & (c if bits & 1 else ~c)
    return result


def halves(words: Words) -> torch.Tensor:
    """Pairs of bfloat16 as float64 [..., 2], low half first."""
    return torch.from_numpy(words.copy().view(np.int16).reshape(*words.shape, 2)).view(torch.bfloat16).double()


def _fma_bf16x2(a: Words, b: Words, c: Words) -> Words:
    """Rounded once: the sum of products of bfloat16 numbers of like size is exact in float64."""
    rounded = (halves(a) * halves(b) + halves(c)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().copy().view(np.uint32).reshape(a.shape)


OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma_bf16x2,
    "add.rn.bf16x2": lambda a, b: _fma_bf16x2(a, np.full_like(a, 0x3F803F80), b),
    "mul.rn.bf16x2": lambda a, b: _fma_bf16x2(a, b, np.full_like(a, 0x80008000)),
}
