"""What becomes of a sound is what transformers' own processors make of it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soxr
from sounds import TOWERED, UNIFIED, noise, saved

from modelserve.model.audio import RATE, AudioArchitecture
from modelserve.sizing.media.audio_input import AudioInput
from modelserve_worker.media import spectrum
from modelserve_worker.media.audio_reader import AudioReader, DecodedSound
from modelserve_worker.media.decode_pool import DecodePool
from modelserve_worker.media.quiet_cuts import cuts, quietest
from modelserve_worker.media.spectrum import log_mel

LENGTHS = [161, 162, 320, 321, 479, 480, 481, 641, 1919, 1920, 1921, 16_000, 40_123, 160_001, 479_999, 480_000]


@pytest.fixture(scope="module")
def pool() -> Iterator[DecodePool]:
    made = DecodePool(1)
    yield made
    made.close()


def read(pool: DecodePool, data: bytes, architecture: AudioArchitecture, seconds: int = 30) -> DecodedSound:
    reader = AudioReader(AudioInput(1, seconds, architecture), pool)
    return reader.frames(reader.look(data), "")


def reference(samples: Any) -> tuple[Any, int]:
    """Frames that are not padding, and how many rows the mask leaves behind two convolutions."""
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    made = Gemma4AudioFeatureExtractor()([samples])
    mask = made["input_features_mask"][0]
    return made["input_features"][0][mask], int(mask[::2][::2].sum())


@pytest.mark.drawn
@pytest.mark.parametrize("samples", LENGTHS)
def test_spectra(samples: int) -> None:
    heard = noise(samples / RATE, seed=samples)
    assert len(heard) == samples
    wanted, rows = reference(heard)
    made = log_mel(heard)
    assert made.dtype == np.float32
    assert made.shape == wanted.shape
    assert float(np.abs(made - wanted).max()) <= 1e-5
    assert TOWERED.soft_tokens(samples) == rows


@pytest.mark.drawn
@pytest.mark.parametrize("seed", range(20))
def test_spectra_of_fresh_sounds(seed: int) -> None:
    """Quiet and loud, tones and clicks, with silence in between."""
    generator = np.random.default_rng(seed)
    samples = noise(float(generator.uniform(0.05, 6)), seed=seed) * 10.0 ** generator.uniform(-4, 0)
    at = np.arange(len(samples)) / RATE
    samples += 0.3 * np.sin(2 * np.pi * generator.uniform(50, 7_900) * at)
    samples[len(samples) // 3 : len(samples) // 2] = 0
    samples[:: int(generator.integers(500, 5_000))] = 1
    samples = samples.astype(np.float32)
    wanted, rows = reference(samples)
    assert float(np.abs(log_mel(samples) - wanted).max()) <= 1e-5
    assert TOWERED.soft_tokens(len(samples)) == rows


@pytest.mark.parametrize("fault", ["window", "triangles", "floor", "zeros"])
def test_the_comparison_of_spectra_notices(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = noise(1, seed=3)
    wanted, _ = reference(heard)
    triangles = spectrum.mel_triangles()
    if fault == "window":
        monkeypatch.setattr(spectrum, "_window", lambda: np.hanning(320).astype(np.float32))
    elif fault == "triangles":
        monkeypatch.setattr(spectrum, "mel_triangles", lambda: np.roll(triangles, 1, axis=1))
    elif fault == "floor":
        monkeypatch.setattr(spectrum, "_FLOOR", np.float32(1e-5))
    made = log_mel(heard[1:]) if fault == "zeros" else log_mel(heard)
    assert float(np.abs(made[: len(wanted)] - wanted[: len(made)]).max()) > 1e-3


def test_as_many_rows_as_the_reference_for_every_length() -> None:
    """Of the processor's own arithmetic; of what it takes whole, to 30 s."""
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    hops = SimpleNamespace(frame_length=320, hop_length=160)
    asked = SimpleNamespace(audio_seq_length=750, feature_extractor=hops)

    class Length:
        def __init__(self, samples: int) -> None:
            self.samples = samples

        def __len__(self) -> int:
            return self.samples

    theirs = [Gemma4Processor._compute_audio_num_tokens(asked, Length(n), RATE) for n in range(161, 480_001)]
    ours = [TOWERED.soft_tokens(n) for n in range(161, 480_001)]
    assert ours == theirs
    assert (TOWERED.soft_tokens(160), TOWERED.soft_tokens(161), TOWERED.soft_tokens(480_000)) == (0, 1, 750)


@pytest.mark.parametrize("samples", [1, 639, 640, 641, 100_000, 700_000])
def test_samples_as_they_are(samples: int, pool: DecodePool) -> None:
    """Of the 12B, which hears without a spectrum, also of more than 30 s."""
    from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import Gemma4UnifiedAudioFeatureExtractor

    heard = noise(samples / RATE, seed=samples)
    made = read(pool, saved(heard, subtype="FLOAT"), UNIFIED, 60)
    wanted = Gemma4UnifiedAudioFeatureExtractor()(heard)
    assert np.array_equal(made.frames.values, np.asarray(wanted["input_features"][0]))
    assert (len(made.frames), made.samples) == (int(wanted["input_features_mask"].sum()), samples)


@pytest.mark.parametrize(
    ("kind", "subtype", "rate"),
    [("WAV", "PCM_16", 44_100), ("WAV", "FLOAT", 8_000), ("FLAC", None, 48_000), ("OGG", "VORBIS", 22_050),
     ("OGG", "OPUS", 48_000), ("MP3", None, 44_100), ("MP3", None, 16_000)],
)  # fmt: skip
def test_files_are_one_channel_of_16_khz(kind: str, subtype: str | None, rate: int, pool: DecodePool) -> None:
    """What soundfile reads of the file, its channels' mean, resampled in one piece; read in blocks it is the same."""
    import io

    import soundfile

    data = saved(noise(3.21, rate=rate, channels=2, seed=rate), kind, rate=rate, subtype=subtype)
    read_whole, found = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    assert found == rate
    wanted = soxr.resample(read_whole.mean(axis=1), rate, RATE, quality="HQ")
    made = read(pool, data, UNIFIED)
    heard = made.frames.values.reshape(-1)[: made.samples]
    assert len(heard) == len(wanted)
    assert float(np.abs(heard - wanted).max()) <= 1e-5
    spectra = read(pool, data, TOWERED).frames.values
    assert float(np.abs(spectra - log_mel(heard)).max()) <= 1e-6


async def test_long_recordings_are_cut_where_they_are_quiet(pool: DecodePool) -> None:
    """In silences near the end of what is heard at a time; nothing is left out or heard twice."""
    samples = noise(75, seed=5)
    for second in (27.5, 54.25):
        samples[round((second - 0.1) * RATE) : round((second + 0.1) * RATE)] = 0
    reader = AudioReader(AudioInput(1, 30, UNIFIED), pool)
    pieces = await reader.pieces(reader.look(saved(samples, subtype="FLOAT")))
    heard = np.concatenate([each.frames.values.reshape(-1)[: each.samples] for each in pieces])
    assert np.array_equal(heard, samples)
    ends = np.cumsum([each.samples for each in pieces]) / RATE
    assert ends[:2] == pytest.approx([27.5, 54.25], abs=0.1)
    assert len({each.key for each in pieces}) == 3


@pytest.mark.parametrize("seconds", [1, 29.99, 30, 30.0001, 31, 59, 60.5, 200])
def test_no_piece_is_longer_than_may_be_or_next_to_nothing(seconds: float) -> None:
    samples = noise(seconds, seed=7)
    ends = cuts(samples, 30 * RATE)
    sizes = np.diff([0, *ends])
    assert ends[-1] == len(samples)
    assert sizes.max() <= 30 * RATE
    assert sizes.min() >= min(RATE, len(samples))
    assert len(ends) >= seconds / 30
    assert quietest(np.zeros(RATE, dtype=np.float32)) > RATE - 3_000, "the last of several"
