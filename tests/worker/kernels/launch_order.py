"""Launches without programmatic dependent launch, to compare with: a kernel starts when all before it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from modelserve_worker.kernels.attention.hopper import (
    decode_stream_sm90,
    global_chunk_sm90,
    sliding_chunk_sm90,
    sliding_decode_sm90,
    v_only_decode_sm90,
)
from modelserve_worker.kernels.compiling import cuda_kernel, dependent_launch
from modelserve_worker.kernels.experts import chosen_rows_sm90, grouped_rows_sm90
from modelserve_worker.kernels.products.hopper import (
    cluster_rows_sm90,
    integer_rows_sm90,
    linear_int4_sm90,
    linear_rows_sm90,
)


@contextmanager
def one_after_the_other() -> Iterator[None]:
    def launch(*arguments: Any, **options: Any) -> None:
        cuda_kernel.launch(*arguments, **{**options, "dependent": False})

    with (
        mock.patch.object(dependent_launch, "current_target", return_value=None),
        mock.patch.object(chosen_rows_sm90, "launch", launch),
        mock.patch.object(global_chunk_sm90, "launch", launch),
        mock.patch.object(cluster_rows_sm90, "launch", launch),
        mock.patch.object(v_only_decode_sm90, "launch", launch),
        mock.patch.object(grouped_rows_sm90, "launch", launch),
        mock.patch.object(linear_int4_sm90, "launch", launch),
        mock.patch.object(integer_rows_sm90, "launch", launch),
        mock.patch.object(linear_rows_sm90, "launch", launch),
        mock.patch.object(sliding_chunk_sm90, "launch", launch),
        mock.patch.object(sliding_decode_sm90, "launch", launch),
        mock.patch.object(decode_stream_sm90, "launch", launch),
    ):
        yield
