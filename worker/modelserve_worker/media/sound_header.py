"""What a sound is, by its first bytes: its name and declared type say nothing."""

from __future__ import annotations

from modelserve_worker.media.media_error import MediaUndecodable

SERVED = "WAV, FLAC, OGG and MP3"
_OTHERS = {  # what people send else: offset of the magic, magics, name
    "M4A, MP4 or MOV": (4, (b"ftyp",)),
    "WebM or Matroska": (0, (b"\x1aE\xdf\xa3",)),
    "AAC": (0, (b"\xff\xf0", b"\xff\xf1", b"\xff\xf8", b"\xff\xf9", b"ADIF")),
    "AIFF": (0, (b"FORM",)),
    "AMR": (0, (b"#!AMR",)),
    "WMA": (0, (b"0&\xb2u",)),
    "CAF": (0, (b"caff",)),
    "WAV of 64 bits": (0, (b"RF64", b"BW64")),
}


def sound_format(data: bytes) -> str:
    """WAV, FLAC, OGG or MP3. Raises MediaUndecodable."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "WAV"
    if data[:4] == b"fLaC":
        return "FLAC"
    if data[:4] == b"OggS":
        return "OGG"
    if data[:3] == b"ID3" or _begins_frame(data):
        return "MP3"
    other = next((name for name, (at, magics) in _OTHERS.items() if data[at:].startswith(magics)), None)
    if other is None:
        found = data[:4].hex() or "nothing"
        raise MediaUndecodable(f"it begins with {found}, which is no sound that is read here; send {SERVED}")
    raise MediaUndecodable(
        f"it looks like {other}, which is not read here; send {SERVED}: ffmpeg -i FILE -ac 1 -ar 16000 sound.flac"
    )


def _begins_frame(data: bytes) -> bool:
    """Whether it is the head of a frame of MPEG, of a layer (those of AAC have none), a rate and a version that are."""
    if len(data) < 4 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return False
    version, layer, bit_rate, rate = data[1] >> 3 & 3, data[1] >> 1 & 3, data[2] >> 4, data[2] >> 2 & 3
    return version != 1 and layer != 0 and bit_rate != 15 and rate != 3
