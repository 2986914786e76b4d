"""Checkpoints of all variants, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from model_checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of the float32 checkpoint of a variant; read-only, shared by all tests."""
    made: dict[str, Path] = {}

    def directory(variant: str) -> Path:
        if variant not in made:
            made[variant] = tmp_path_factory.mktemp(variant)
            make_checkpoint(variant, made[variant], seed=1)
        return made[variant]

    return directory
