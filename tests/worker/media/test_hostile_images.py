"""What an image may cost is bounded before it is decoded, and what decoding costs ends with it."""

from __future__ import annotations

import base64
import io
import os
import signal
import struct
import threading
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from modelserve.model.images import ImageArchitecture
from modelserve.sizing.media.image_input import ENCODED_BYTES, ImageInput
from modelserve_worker.media.data_url import data_of
from modelserve_worker.media.decode_order import DecodeOrder
from modelserve_worker.media.decode_pool import DecodePool
from modelserve_worker.media.image_header import read_image_header
from modelserve_worker.media.image_reader import ImageReader
from modelserve_worker.media.media_error import MediaError, MediaTooLarge, MediaUndecodable, MediaUrlRefused

UNIFIED = ImageArchitecture(patch_side=48, embed_size=64, positions=1120, mutual=True)


def reader_with(pool: DecodePool, **options: int) -> ImageReader:
    return ImageReader(ImageInput(4, 280, UNIFIED), pool, **options)


def saved(kind: str, height: int = 60, width: int = 80, **options: object) -> bytes:
    held = io.BytesIO()
    values = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(values).save(held, kind, **options)
    return held.getvalue()


def png_of(width: int, height: int, rows: int) -> bytes:
    """A PNG that says it is so large, and has so many rows of zeros."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    pixels = zlib.compress(b"\0" * ((3 * width + 1) * rows), 9)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_bounds_are_seen_before_a_process_starts() -> None:
    pool = DecodePool(1)
    reader = reader_with(pool)
    refused = {
        png_of(9000, 9000, 1): (MediaTooLarge, "81000000 pixels; the limit is 64000000"),
        b"\xff\xd8\xff" + b"\0" * ENCODED_BYTES: (MediaTooLarge, f"the limit is {ENCODED_BYTES}"),
        png_of(0, 9, 1): (MediaUndecodable, "0 x 9 pixels"),
        b"": (MediaUndecodable, "begins with nothing"),
        b"<svg xmlns='...'/>": (MediaUndecodable, "looks like SVG"),
        b"\0\0\0\x18ftypheic": (MediaUndecodable, "looks like HEIC"),
        b"GIF89a" + bytes(7) + b"\x3b": (MediaUndecodable, "holds no frame"),
        saved("JPEG")[:100]: (MediaUndecodable, "ends inside its header"),
    }
    for data, (kind, words) in refused.items():
        with pytest.raises(kind, match=words):
            reader.look(data, 280)
    assert pool.process_ids == ()


def test_broken_files_cost_their_own_request() -> None:
    """The process goes on: what it decodes next is right."""
    pool = DecodePool(1)
    reader = reader_with(pool, known_bytes=0)
    whole = saved("PNG")
    first = reader.patches(reader.look(whole, 70), "")
    (process,) = pool.process_ids
    for data, words in (
        (whole[:-400], "cannot be decoded"),
        (saved("JPEG")[:-900], "truncated"),
        (whole.replace(whole[60:80], bytes(20)), "cannot be decoded"),
    ):
        with pytest.raises(MediaUndecodable, match=words):
            reader.patches(reader.look(data, 70), "")
    image = reader.look(saved("JPEG"), 70)
    with pytest.raises(MediaUndecodable, match="its header says 81 x 60"):
        pool.decode(image.data, image.order._replace(width=81))
    assert np.array_equal(reader.patches(reader.look(whole, 70), "").values, first.values)
    assert pool.process_ids == (process,)
    reader.close()


def test_a_bomb_meets_the_memory_of_its_process_and_the_next_image_is_decoded() -> None:
    pool = DecodePool(1, memory_bytes=200 << 20)
    reader = reader_with(pool)
    with pytest.raises(MediaTooLarge, match="more than the 209715200 bytes of memory"):
        reader.patches(reader.look(png_of(8000, 8000, 1), 70), "")
    assert len(reader.patches(reader.look(saved("PNG"), 70), "")) == 63
    reader.close()


@pytest.mark.parametrize(
    ("ended_by", "words"), [(signal.SIGXCPU, "more than 10 s of a processor"), (signal.SIGSEGV, "cannot be decoded")]
)
def test_an_image_whose_process_ends_is_told_why_and_another_takes_its_place(ended_by: int, words: str) -> None:
    pool = DecodePool(1)
    reader = reader_with(pool, known_bytes=0)
    reader.patches(reader.look(saved("PNG"), 70), "")
    (process,) = pool.process_ids
    os.kill(process, signal.SIGSTOP)
    told: list[Exception] = []

    def ask() -> None:
        try:
            reader.patches(reader.look(saved("PNG"), 70), "")
        except MediaError as error:
            told.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    os.kill(process, ended_by)
    os.kill(process, signal.SIGCONT)
    thread.join(30)
    assert words in str(told[0])
    assert len(reader.patches(reader.look(saved("PNG"), 70), "")) == 63
    assert pool.process_ids != (process,)
    reader.close()


def test_a_process_that_hangs_is_ended_by_the_clock() -> None:
    pool = DecodePool(1, wall_s=30.0)
    reader = reader_with(pool, known_bytes=0)
    reader.patches(reader.look(saved("PNG"), 70), "")
    pool.wall_s = 0.2
    (process,) = pool.process_ids
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(MediaUndecodable, match=r"did not end within 0\.2 s"):
        reader.patches(reader.look(saved("PNG"), 70), "")
    reader.close()


def test_processes_end_with_the_worker_and_know_nothing_of_it() -> None:
    pool = DecodePool(2, environment=os.environ | {"MODELSERVE_API_KEY_FILE": "/keys"})
    reader = reader_with(pool)
    reader.patches(reader.look(saved("PNG"), 70), "")
    (process,) = pool.process_ids
    with open(f"/proc/{process}/environ", "rb") as held:  # noqa: PTH123
        assert b"MODELSERVE" not in held.read()
    (decoder,) = pool._running
    decoder._connection.close()  # as the kernel does where the worker is killed
    assert decoder.process.wait(30) == 0


def test_a_known_image_is_not_decoded_again_but_for_others() -> None:
    pool = DecodePool(1)
    reader = reader_with(pool)
    image = reader.look(saved("PNG"), 70)
    first = reader.patches(image, "a")
    assert reader.patches(reader.look(saved("PNG"), 70), "a") is first
    assert reader.patches(image, "b") is not first
    assert reader.patches(reader.look(saved("PNG"), 140), "a") is not first
    reader.close()


def test_known_images_go_by_age_when_their_room_is_full() -> None:
    pool = DecodePool(1)
    sizes = [(60, 80), (61, 80), (62, 80)]
    images = [reader_with(pool).look(saved("PNG", *size), 70) for size in sizes]
    reader = reader_with(pool, known_bytes=2 * 63 * UNIFIED.patch_values)
    for each in (images[0], images[1], images[0], images[2]):
        reader.patches(each, "")
    assert [reader.is_known(each, "") for each in images] == [True, False, True]
    reader.close()


def test_keys_are_of_bytes_and_budget() -> None:
    reader = reader_with(DecodePool(1))
    data = saved("PNG")
    keys = [reader.look(data, 70).key, reader.look(data, 280).key, reader.look(saved("JPEG"), 70).key]
    assert len(set(keys)) == 3
    assert reader.look(bytes(data), 70).key == keys[0]


@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [
        ("https://example.com/a.png", MediaUrlRefused, "fetches nothing; send the image itself"),
        ("http://169.254.169.254/latest", MediaUrlRefused, "fetches nothing"),
        ("file:///etc/passwd", MediaUrlRefused, "fetches nothing"),
        ("/etc/passwd", MediaUrlRefused, "fetches nothing"),
        ("data:image/png,abc", MediaUndecodable, "not base64"),
        ("data:image/png;base64,@@@@", MediaUndecodable, "no valid base64"),
        ("data:image/png;base64,\u00e4\u00e4", MediaUndecodable, "no valid base64"),
        ("data:;base64," + "A" * 4000, MediaTooLarge, "the limit is 1000"),
    ],
)
def test_addresses(url: str, kind: type[MediaError], words: str) -> None:
    with pytest.raises(kind, match=words):
        data_of(url, most_bytes=1000)


def test_base64_with_line_ends() -> None:
    held = bytes(range(200))
    assert data_of("DATA:image/png;base64," + base64.encodebytes(held).decode(), most_bytes=200) == held


HEADS: list[Callable[[], bytes]] = [lambda kind=kind: saved(kind) for kind in ("JPEG", "PNG", "WEBP", "GIF")]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 3), st.data())
def test_no_header_does_more_than_be_refused(kind: int, data: st.DataObject) -> None:
    held = bytearray(HEADS[kind]())
    for _ in range(data.draw(st.integers(1, 6))):
        held[data.draw(st.integers(0, min(len(held) - 1, 200)))] = data.draw(st.integers(0, 255))
    try:
        header = read_image_header(bytes(held[: data.draw(st.integers(0, len(held)))]))
    except MediaUndecodable:
        return
    assert header.pixels > 0
    assert 1 <= header.orientation <= 8


def test_many_pieces_are_refused() -> None:
    comments = b"\xff\xfe\0\x02" * 70_000
    with pytest.raises(MediaUndecodable, match="more than 65536 pieces"):
        read_image_header(b"\xff\xd8" + comments + saved("JPEG")[2:])


def test_orders_say_all_that_a_decoder_needs() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = reader_with(DecodePool(1)).look(saved("JPEG", 60, 80, exif=exif), 280)
    assert image.order == DecodeOrder("JPEG", 80, 60, 6, 912, 672)
    assert image.soft_tokens == 912 * 672 // 48**2
