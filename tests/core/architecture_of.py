from __future__ import annotations

from modelserve.model.architecture import ModelArchitecture
from modelserve.published import published_model


def architecture_of(size: str, *, form: str = "-it") -> ModelArchitecture:
    """What Gemma 4 is in a published size ("31B"), tuned for instructions; the base model has the form ""."""
    facts = published_model(f"hf://google/gemma-4-{size}{form}")
    assert facts is not None
    return facts.architecture
