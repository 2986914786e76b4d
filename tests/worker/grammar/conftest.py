"""The trained checkpoint behind one engine, for all tests here."""

import pytest
from trained_answers import TrainedModel


@pytest.fixture(scope="session")
def model() -> TrainedModel:
    return TrainedModel()
