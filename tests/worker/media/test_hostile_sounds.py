"""What a sound may cost is bounded before and while it is decoded, whatever its header says."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sounds import TOWERED, UNIFIED, noise, saved

from modelserve.model.audio import RATE, AudioArchitecture
from modelserve.sizing.media.audio_input import SOUND_BYTES, AudioInput
from modelserve_worker.media.audio_reader import AudioReader
from modelserve_worker.media.decode_pool import DecodePool
from modelserve_worker.media.media_error import (
    AudioTooLong,
    AudioTooShort,
    MediaError,
    MediaTooLarge,
    MediaUndecodable,
)
from modelserve_worker.media.sound_header import sound_format


def reader_with(
    pool: DecodePool, architecture: AudioArchitecture = TOWERED, seconds: int = 30, **options: int
) -> AudioReader:
    return AudioReader(AudioInput(4, seconds, architecture), pool, **options)


def wav(samples: bytes, *, claimed: int, rate: int = RATE, channels: int = 1, bits: int = 16) -> bytes:
    """Integers, in a file that says it has so many bytes of them."""
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * block, block, bits)
    return (
        b"RIFF" + struct.pack("<I", 36 + claimed & 0xFFFFFFFF) + b"WAVEfmt " + struct.pack("<I", len(form)) + form
        + b"data" + struct.pack("<I", claimed) + samples
    )  # fmt: skip


def test_what_is_no_sound_here_is_seen_before_a_process_starts() -> None:
    pool = DecodePool(1)
    reader = reader_with(pool)
    refused = {
        b"": (MediaUndecodable, "begins with nothing"),
        b"RIFF" + bytes(4) + b"AVI ": (MediaUndecodable, "begins with 52494646"),
        b"\0\0\0\x20ftypM4A ": (MediaUndecodable, r"looks like M4A, MP4 or MOV, .* ffmpeg -i FILE .* sound\.flac"),
        b"\x1aE\xdf\xa3webm": (MediaUndecodable, r"looks like WebM or Matroska, .* ffmpeg -i"),
        b"\xff\xf1\x50\x80\x00": (MediaUndecodable, r"looks like AAC, .* ffmpeg -i"),
        b"fLaC" + bytes(SOUND_BYTES): (MediaTooLarge, f"the limit is {SOUND_BYTES}"),
    }
    for data, (kind, words) in refused.items():
        with pytest.raises(kind, match=words):
            reader.look(data)
    assert pool.process_ids == ()


def test_broken_files_cost_their_own_request() -> None:
    """The process goes on: what it decodes next is right."""
    pool = DecodePool(1)
    reader = reader_with(pool, known_bytes=0)
    whole = saved(noise(1), "FLAC")
    first = reader.frames(reader.look(whole), "")
    (process,) = pool.process_ids
    for data, kind, words in (
        (b"fLaC" + bytes(400), MediaUndecodable, "the FLAC file cannot be decoded"),
        (b"OggS" + bytes(400), MediaUndecodable, "the OGG file cannot be decoded"),
        (b"ID3" + bytes(4000), MediaUndecodable, "the MP3 file cannot be decoded"),
        (b"RIFF\x20\0\0\0WAVE" + bytes(40), MediaUndecodable, "the WAV file cannot be decoded"),
        (wav(bytes(3200), claimed=3200, rate=900), MediaUndecodable, "900 samples a second; 1000 to 384000"),
        (wav(bytes(3400), claimed=3400, channels=17), MediaUndecodable, "17 channels; the limit is 16"),
        (saved(np.full(RATE, np.nan, dtype=np.float32), subtype="FLOAT"), MediaUndecodable, "no numbers"),
        (saved(np.full(RATE, 1e30, dtype=np.float32), subtype="FLOAT"), MediaUndecodable, "beyond 1e"),
        (saved(noise(160 / RATE)), AudioTooShort, "160 samples at 16000 a second; .* no fewer than 161"),
        (wav(b"", claimed=0), AudioTooShort, "0 samples"),
    ):
        with pytest.raises(kind, match=words):
            reader.frames(reader.look(data), "")
    assert np.array_equal(reader.frames(reader.look(whole), "").frames.values, first.frames.values)
    assert pool.process_ids == (process,)
    reader.close()


def test_a_file_that_ends_early_is_as_long_as_it_is() -> None:
    """What is there is heard, as players do: a recorder that was stopped leaves such files."""
    pool = DecodePool(1)
    reader = reader_with(pool, UNIFIED)
    samples = (noise(1) * 32767).astype("<i2").tobytes()
    for claimed in (len(samples), 0xFFFFFF00, len(samples) * 9):
        assert reader.frames(reader.look(wav(samples, claimed=claimed)), "").samples == RATE
    reader.close()


@pytest.mark.parametrize(("architecture", "seconds"), [(TOWERED, 30), (UNIFIED, 7)])
def test_one_sample_too_many_is_too_long(architecture: AudioArchitecture, seconds: int) -> None:
    reader = reader_with(DecodePool(1), architecture, seconds)
    for rate in (16_000, 44_100, 11_025):
        just = wav(bytes(2 * seconds * rate), claimed=2 * seconds * rate, rate=rate)
        assert reader.frames(reader.look(just), "").samples <= seconds * RATE
        longer = wav(bytes(2 * seconds * rate + 2), claimed=800, rate=rate)  # and it says that it is short
        if rate == 16_000:
            assert reader.frames(reader.look(longer), "").samples == 400, "a WAV ends where its chunk does"
        size = 2 * seconds * rate + 2
        with pytest.raises(AudioTooLong, match=f"longer than {seconds} s"):
            reader.frames(reader.look(wav(bytes(size), claimed=size, rate=rate)), "")
    reader.close()


def test_hours_in_few_bytes_stop_at_the_limit() -> None:
    """Silence of three hours has some hundred kilobytes as FLAC: no more of it is decoded than may be heard."""
    import io

    import soundfile

    held = io.BytesIO()
    with soundfile.SoundFile(held, "w", RATE, 1, format="FLAC") as file:
        for _ in range(180):
            file.write(np.zeros(60 * RATE, dtype=np.int16))
    assert len(held.getvalue()) < 1 << 20
    pool = DecodePool(1, cpu_seconds=5)
    reader = reader_with(pool)
    with pytest.raises(AudioTooLong):
        reader.frames(reader.look(held.getvalue()), "")
    (process,) = pool.process_ids
    with open(f"/proc/{process}/status") as status:  # noqa: PTH123
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    assert peak < 160 << 10, "kB: of libraries, not of three hours, which have 690 MB"
    reader.close()


def test_a_known_sound_is_not_decoded_again_but_for_others() -> None:
    reader = reader_with(DecodePool(1))
    data = saved(noise(1))
    sound = reader.look(data)
    first = reader.frames(sound, "a")
    assert reader.frames(reader.look(bytes(data)), "a") is first
    assert reader.known(sound, "a") is first
    assert reader.known(sound, "b") is None
    assert reader.frames(sound, "b") is not first
    other = reader.look(saved(noise(1, seed=2)))
    assert other.key != sound.key
    small = reader_with(DecodePool(1), known_bytes=first.frames.values.nbytes)
    small.frames(sound, "")
    small.frames(other, "")
    assert (small.known(sound, ""), small.known(other, "") is None) == (None, False)
    reader.close()
    small.close()


_HEADS = [saved(noise(0.1), kind) for kind in ("WAV", "FLAC", "OGG", "MP3")]


@pytest.fixture(scope="module")
def shared() -> Iterator[AudioReader]:
    reader = reader_with(DecodePool(1), known_bytes=0)
    yield reader
    reader.close()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 3), st.data())
def test_damaged_files_are_sounds_or_refused(shared: AudioReader, kind: int, data: st.DataObject) -> None:
    held = bytearray(_HEADS[kind])
    for _ in range(data.draw(st.integers(1, 6))):
        held[data.draw(st.integers(0, len(held) - 1))] = data.draw(st.integers(0, 255))
    try:
        made = shared.frames(shared.look(bytes(held[: data.draw(st.integers(0, len(held)))])), "")
    except MediaError:
        return
    assert np.isfinite(made.frames.values).all()
    assert len(made.frames) == TOWERED.soft_tokens(made.samples) >= 1


@pytest.mark.parametrize(
    ("begins", "name"),
    [
        (b"\0\0\0\x20ftypmp42", "M4A, MP4 or MOV"), (b"\x1aE\xdf\xa3\1", "WebM or Matroska"), (b"\xff\xf1\x4c", "AAC"),
        (b"\xff\xf9\x4c", "AAC"), (b"ADIF", "AAC"), (b"FORM\0\0\0\0AIFF", "AIFF"), (b"#!AMR\n", "AMR"),
        (b"0&\xb2u\x8e", "WMA"), (b"caff\0", "CAF"), (b"RF64\xff", "WAV of 64 bits"),
    ],
)  # fmt: skip
def test_other_formats_are_refused_by_name(begins: bytes, name: str) -> None:
    with pytest.raises(MediaUndecodable, match=f"it looks like {name}, which is not read here; send WAV, FLAC, OGG"):
        sound_format(begins + bytes(8))


@pytest.mark.parametrize(
    "head", [b"\xff\xeb\x90\x00", b"\xff\xfb\xf0\x00", b"\xff\xfb\x9c\x00", b"\xff\xfb\x90", b"\xfe\xfb\x90\0"]
)
def test_what_is_no_frame_of_mpeg_is_no_sound(head: bytes) -> None:
    """A version, a bit rate and a rate that there are not, a head that is cut, and no sync."""
    assert sound_format(b"\xff\xfb\x90\x00") == "MP3"
    with pytest.raises(MediaUndecodable):
        sound_format(head)


def test_formats_by_their_first_bytes() -> None:
    assert [sound_format(each) for each in _HEADS] == ["WAV", "FLAC", "OGG", "MP3"]
    assert sound_format(b"ID3\x04" + bytes(8)) == "MP3"
