"""What a checkpoint's config files say of a model, where a broken one is a fault of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelserve import inspection
from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.assistant import AssistantArchitecture
from modelserve.model.checkpoint_files import GENERATION_FILE, read_generation_config
from modelserve.model.drafters.reading import DrafterArchitecture
from modelserve.model.weight_format import WeightFormat
from modelserve.sizing.media.audio_input import AudioInput
from modelserve.sizing.media.image_input import ImageInput
from modelserve_worker.weights.files import InvalidCheckpoint


def read_architecture(directory: Path) -> ModelArchitecture:
    """Geometry from DIRECTORY/config.json, EOS ids from it and from generation_config.json where there is one.

    Raises InvalidCheckpoint when one of them is broken, UnsupportedModel for another model.
    """
    with _faults_of_a_checkpoint():
        architecture = inspection.read_architecture(directory)
        named = read_generation_config(directory).get("eos_token_id")
    token_ids = [] if named is None else named if isinstance(named, list) else [named]
    if not all(type(token_id) is int and 0 <= token_id < architecture.vocab_size for token_id in token_ids):
        raise InvalidCheckpoint(
            f"{directory / GENERATION_FILE}: eos_token_id {named!r}; give one or several token ids in "
            f"0..{architecture.vocab_size - 1}",
            field=GENERATION_FILE,
        )
    return architecture.model_copy(update={"eos_token_ids": tuple(sorted({*architecture.eos_token_ids, *token_ids}))})


def read_weight_format(directory: Path) -> WeightFormat | None:
    """How the checkpoint stores its text weights; None where it does not quantise them: they are held as computed.

    Raises InvalidCheckpoint when a file is broken, UnsupportedModel for a format that is not served.
    """
    with _faults_of_a_checkpoint():
        stored = inspection.read_weight_format(directory)
    return stored if stored.quantised else None


def read_unused_parts(directory: Path, stored: WeightFormat) -> tuple[str, ...]:
    """What the checkpoint states of its quantisation that is not used, a sentence each. Raises as above."""
    with _faults_of_a_checkpoint():
        return inspection.read_unused_parts(directory, stored)


def read_images(args: EngineArgs) -> ImageInput | None:
    """Room for images of a worker with `args`; None: it takes none. Raises InvalidCheckpoint when the config is broken,
    UnsupportedModel for a model that takes none here, InvalidInput for settings that do not fit it."""
    with _faults_of_a_checkpoint(but_of="maxSoftTokens"):
        return inspection.read_images(args)


def read_audio(args: EngineArgs) -> AudioInput | None:
    """The same of sounds."""
    with _faults_of_a_checkpoint(but_of="audioSeconds"):
        return inspection.read_audio(args)


def read_assistant(directory: Path) -> AssistantArchitecture:
    """Geometry of the assistant in DIRECTORY. Raises InvalidCheckpoint when its config is broken, UnsupportedModel for
    what is no assistant that this release serves."""
    with _faults_of_a_checkpoint():
        return inspection.read_assistant(directory)


def read_drafter(directory: Path) -> DrafterArchitecture:
    """Geometry of the drafter in DIRECTORY. Raises as `read_assistant`."""
    with _faults_of_a_checkpoint():
        return inspection.read_drafter(directory)


@contextmanager
def _faults_of_a_checkpoint(*, but_of: str = "") -> Iterator[None]:
    """`but_of`: a setting, whose faults are somebody else's."""
    try:
        yield
    except UnsupportedModel:
        raise
    except InvalidInput as error:
        if but_of and error.field == but_of:
            raise
        raise InvalidCheckpoint(str(error), field=error.field) from error
