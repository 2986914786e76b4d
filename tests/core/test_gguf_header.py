"""The header of a GGUF file: what is read of it, and that one which lies is refused before it costs memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest
from gguf_writer import gguf_bytes, header, info, string, value

from modelserve.errors import InvalidInput
from modelserve.model.gguf.block_types import BLOCK_TYPES
from modelserve.model.gguf.files import gguf_files, models_of, read_gguf, whole
from modelserve.model.gguf.header import ArraySpan, GgufHeader, read_gguf_header, read_numbers, read_strings

METADATA = {
    "general.architecture": "gemma4",
    "gemma4.block_count": 2,
    "gemma4.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma4.attention.sliding_window_pattern": [True, False],
    "tokenizer.ggml.tokens": ["<pad>", "\u2581a", "\U0001f642"],
    "tokenizer.ggml.scores": [-1.0, -2.0, -1000.0],
    "tokenizer.ggml.add_bos_token": True,
}
TENSORS = {
    "token_embd.weight": ("Q8_0", (3, 64), bytes(3 * 2 * 34)),
    "output_norm.weight": ("F32", (64,), bytes(256)),
}
WHOLE = gguf_bytes(METADATA, TENSORS)
MOST_BYTES = 1 << 20  # of memory that a refusal may take


def parse(raw: bytes, *, size: int | None = None) -> GgufHeader:
    return read_gguf_header(lambda start, count: raw[start : start + count], size=size or len(raw), name="x.gguf")


def test_metadata_and_tensors_are_those_that_were_written() -> None:
    found = parse(WHOLE)
    assert found.metadata["gemma4.block_count"] == 2
    assert found.metadata["gemma4.attention.sliding_window_pattern"] == (True, False)
    assert found.metadata["tokenizer.ggml.add_bos_token"] is True
    tokens, scores = (found.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores"))
    assert isinstance(tokens, ArraySpan)
    assert isinstance(scores, ArraySpan)

    def read(start: int, count: int) -> bytes:
        return WHOLE[start : start + count]

    assert [text.decode() for text in read_strings(read, tokens)] == METADATA["tokenizer.ggml.tokens"]
    assert list(read_numbers(read, scores)) == METADATA["tokenizer.ggml.scores"]
    embedding, norm = found.tensors.values()
    assert (embedding.name, embedding.type.name, embedding.shape) == ("token_embd.weight", "Q8_0", (3, 64))
    assert (norm.start % 32, norm.end, norm.end - norm.start) == (0, len(WHOLE), 256)
    assert embedding.end <= norm.start


def test_the_package_reads_the_same(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    assert {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()} == {
        number: (kind.name, kind.elements, kind.bytes) for number, kind in BLOCK_TYPES.items()
    }
    (tmp_path / "x.gguf").write_bytes(WHOLE)
    theirs, ours = gguf.GGUFReader(tmp_path / "x.gguf"), parse(WHOLE)
    assert {each.name: (each.data_offset, each.n_bytes) for each in theirs.tensors} == {
        each.name: (each.start, each.end - each.start) for each in ours.tensors.values()
    }
    assert theirs.fields["gemma4.block_count"].contents() == ours.metadata["gemma4.block_count"]


def test_a_file_of_the_package_is_read(tmp_path: Path) -> None:
    gguf, np = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "gemma4")
    writer.add_block_count(7)
    writer.add_token_list([b"a", b"\xe2\x96\x81b"])
    writer.add_sliding_window_pattern([True, False])
    writer.add_tensor("output_norm.weight", np.arange(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    raw = (tmp_path / "x.gguf").read_bytes()
    found = parse(raw)
    assert found.metadata["gemma4.block_count"] == 7
    tensor = found.tensors["output_norm.weight"]
    assert struct.unpack("<64f", raw[tensor.start : tensor.end]) == tuple(float(i) for i in range(64))


def _patched(at: int, code: str, number: int) -> bytes:
    raw = bytearray(WHOLE)
    struct.pack_into(code, raw, at, number)
    return bytes(raw)


HUGE = 1 << 60
_INFO = info("output_norm.weight", 0, (64,), 0)
LIES = {
    "no magic": (b"GGML" + WHOLE[4:], "not a GGUF file"),
    "empty": (b"", "4 bytes of the 0"),
    "version 1": (_patched(4, "<I", 1), "has version 1"),
    "big-endian": (_patched(4, ">I", 3), "big-endian"),
    "2^60 tensors": (_patched(8, "<Q", HUGE), f"states {HUGE} tensors, but only"),
    "2^60 entries": (_patched(16, "<Q", HUGE), f"states {HUGE} metadata entries"),
    "a key of 2^60 bytes": (_patched(24, "<Q", HUGE), f"a metadata key .*has {HUGE} bytes"),
    "a string past the end": (
        header({}, [])[:16] + struct.pack("<Q", 1) + string("k") + struct.pack("<IQ", 8, 1 << 20),
        "the value of 'k' .*would take 1048576 bytes of the 0",
    ),
    "an array of 2^60": (
        header({}, [])[:16] + struct.pack("<Q", 1) + string("k") + struct.pack("<IIQ", 9, 5, HUGE),
        f"states {HUGE} elements of 'k'",
    ),
    "an array of arrays": (
        header({}, [])[:16] + struct.pack("<Q", 1) + string("k") + struct.pack("<IIQ", 9, 9, 0),
        "holds arrays",
    ),
    "a value of no type": (
        header({}, [])[:16] + struct.pack("<Q", 1) + string("k") + struct.pack("<I", 99) + bytes(8),
        "'k' has type 99",
    ),
    "a key twice": (
        header({}, [])[:16] + struct.pack("<Q", 2) + 2 * (string("k") + value(1)) + bytes(32),
        "'k' stands there twice",
    ),
    "a key that is no text": (
        header({}, [])[:16] + struct.pack("<Q", 1) + string(b"\xff\xff") + value(1),
        "is not UTF-8",
    ),
    "an alignment of 3": (gguf_bytes({"general.alignment": 3}, {}), "general.alignment is 3"),
    "an alignment of 2^30": (gguf_bytes({"general.alignment": 1 << 30}, {}), "a power of two up to"),
    "a tensor twice": (
        header({}, [_INFO, info("output_norm.weight", 0, (64,), 256)]) + bytes(1024),
        "stands there twice",
    ),
    "overlapping tensors": (header({}, [_INFO, info("b", 0, (64,), 128)]) + bytes(1024), "overlap"),
    "a tensor past the end": (header({}, [info("b", 0, (1 << 20,), 0)]) + bytes(1024), "cut short: tensor 'b'"),
    "a tensor of 2^60 rows": (header({}, [info("b", 0, (HUGE, HUGE), 0)]) + bytes(64), "cut short: tensor 'b'"),
    "a name of 65 bytes": (header({}, [info("b" * 65, 0, (1,), 0)]) + bytes(64), "has 65 bytes; 64 are allowed"),
    "no dimensions": (header({}, [string("b") + struct.pack("<IIQ", 0, 0, 0)]) + bytes(64), "has 0 dimensions"),
    "2^31 dimensions": (
        header({}, [string("b") + struct.pack("<IIQ", 1 << 31, 0, 0)]) + bytes(64),
        "dimensions; 1 to 4",
    ),
    "no such type": (header({}, [info("b", 5, (32,), 0)]) + bytes(64), "type 5, .*use a Q4_0 or Q8_0 file"),
    "half a block": (
        header({}, [info("b", 2, (48,), 0)]) + bytes(64),
        r"shape \[48\]; rows of Q4_0 are whole blocks of 32",
    ),
    "an empty tensor": (header({}, [info("b", 0, (0,), 0)]) + bytes(64), r"shape \[0\]"),
    "an odd offset": (header({}, [info("b", 0, (1,), 7)]) + bytes(64), "no multiple of the alignment 32"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_by_name_and_costs_no_memory(lie: str) -> None:
    raw, message = LIES[lie]
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=message):
            parse(raw)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_a_truncated_file_is_refused_wherever_it_ends() -> None:
    for length in range(len(WHOLE)):
        with pytest.raises(InvalidInput):
            parse(WHOLE[:length])


def test_a_file_that_ends_before_its_size_is_told_from_one_that_is_whole() -> None:
    with pytest.raises(InvalidInput, match="cut short"):
        parse(WHOLE[:100], size=len(WHOLE))


def fuzz(seed: int, rounds: int) -> int:
    """Change headers at random and read them. Returns how many were taken for whole; anything but InvalidInput
    raises."""
    rng, taken = random.Random(seed), 0
    for _ in range(rounds):
        raw = bytearray(WHOLE)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(raw))
            kind = rng.randrange(4)
            if kind == 0:
                raw[at] = rng.randrange(256)
            elif kind == 1:
                raw[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, HUGE, (1 << 64) - 1, rng.getrandbits(40))))
            elif kind == 2:
                del raw[at : at + rng.randint(1, 64)]
            else:
                raw[at:at] = rng.randbytes(rng.randint(1, 64))
        try:
            parse(bytes(raw))
            taken += 1
        except InvalidInput:
            pass
    return taken


def test_changed_headers_are_read_or_refused_in_flat_memory() -> None:
    """What comes through differs in values alone: a count or length that was changed is noticed."""
    tracemalloc.start()
    try:
        taken = fuzz(seed=45, rounds=2000)
        assert tracemalloc.get_traced_memory()[1] < 2 * MOST_BYTES
    finally:
        tracemalloc.stop()
    assert 0 < taken < 1500


def test_files_of_one_model_are_its_parts_and_towers_are_left() -> None:
    names = ["m-Q8_0-00002-of-00002.gguf", "m-Q8_0-00001-of-00002.gguf", "mmproj-m-BF16.gguf", "mmproj.gguf", "a.json"]
    assert list(models_of(names).values()) == [["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]]
    (parts,) = models_of(names).values()
    assert whole(parts) == parts
    with pytest.raises(InvalidInput, match=r"of 2 parts of a GGUF model only m-Q8_0-00002-of-00002\.gguf are there"):
        whole(parts[1:])


def _split(folder: Path, *, stated: tuple[int, int] = (1, 2), other: str = "b.weight") -> Path:
    whole = {"split.count": 2, "split.tensors.count": 2}
    first = gguf_bytes({"split.no": 0, **whole}, {"a.weight": ("F32", (1,), bytes(4))})
    second = gguf_bytes({"split.no": stated[0], "split.count": stated[1]}, {other: ("F32", (1,), bytes(4))})
    (folder / "m-00001-of-00002.gguf").write_bytes(first)
    (folder / "m-00002-of-00002.gguf").write_bytes(second)
    return folder


def test_parts_are_one_model(tmp_path: Path) -> None:
    found = read_gguf(_split(tmp_path))
    assert found is not None
    assert {name: path.name for name, (path, _) in found.tensors.items()} == {
        "a.weight": "m-00001-of-00002.gguf", "b.weight": "m-00002-of-00002.gguf"
    }  # fmt: skip
    assert read_gguf(tmp_path / "m-00002-of-00002.gguf") == found


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"stated": (0, 2)}, "says that it is part 0 .* taken for part 1 of 2"),
        ({"stated": (1, 3)}, "of 3; it is taken for part 1 of 2"),
        ({"other": "a.weight"}, "tensor 'a.weight' is both in"),
    ],
)
def test_parts_of_different_models_are_refused(tmp_path: Path, part: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_gguf(_split(tmp_path, **part))


def test_a_directory_with_several_models_asks_for_a_name(tmp_path: Path) -> None:
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf", "mmproj-m.gguf"):
        (tmp_path / name).write_bytes(WHOLE)
    with pytest.raises(InvalidInput, match=r"2 GGUF models \(m-Q4_0.gguf, m-Q8_0.gguf\): name one"):
        gguf_files(tmp_path)
    assert [path.name for path in gguf_files(tmp_path / "m-Q8_0.gguf")] == ["m-Q8_0.gguf"]
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert gguf_files(tmp_path) == ()


def test_a_file_in_a_folder_below_is_found(tmp_path: Path) -> None:
    (tmp_path / "BF16").mkdir()
    (tmp_path / "BF16" / "m.gguf").write_bytes(WHOLE)
    assert gguf_files(tmp_path) == (tmp_path / "BF16" / "m.gguf",)
    assert gguf_files(tmp_path / "nowhere") == ()
