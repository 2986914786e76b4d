"""Compiled code that outlives its process: damaged files are compiled anew, and what others could write is not run."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelserve_worker.kernels.compiling import cuda_kernel, kept_files
from modelserve_worker.kernels.compiling.cache_folder import FOLDER_VARIABLE, folder_fault, settle_cache_folder
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource
from modelserve_worker.kernels.compiling.kept_files import distrust, sealed, trusted_bytes, unsealed, write_whole
from modelserve_worker.kernels.compiling.kernel_cache import CheckedCache, ShippedFirst

OURS, FOREIGN, FS_GROUP = 65532, 1234, 5000
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="files of other users are made by root")
LIBRARY = "launcher.cpython-311-x86_64-linux-gnu.so"


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "zero-filled": lambda content: bytes(len(content)),
    "a byte flipped": flipped,
    "empty": lambda content: b"",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODELSERVE_KERNELS_DIR", str(tmp_path / "shipped"))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(kept_files, "_told", set())
    monkeypatch.setattr(CheckedCache, "_own", [])
    return tmp_path / "cache"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaSource:
    (tmp_path / "small.cu").write_text("")
    monkeypatch.setattr(cuda_kernel, "FOLDER", tmp_path)
    return CudaSource("small.cu", "small", "sm_90a")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that NVRTC has compiled since."""
    files: list[str] = []
    monkeypatch.setattr(cuda_kernel, "compiled", lambda source: (files.append(source.file), (b"\x7fELF" * 50, ""))[1])
    return files


@pytest.mark.parametrize("damage", [*DAMAGES, "of the release before"])
def test_a_damaged_cubin_is_compiled_anew_and_is_whole_from_then_on(
    small: CudaSource, made: list[str], cache: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cubin = cuda_kernel.kept(small)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(DAMAGES[damage](whole) if damage in DAMAGES else cubin)
    with caplog.at_level(logging.WARNING):
        assert cuda_kernel.kept(small) == cubin
    assert len(made) == 2
    assert damage == "empty" or f"{file} is damaged" in caplog.text
    assert file.read_bytes() == whole
    assert cuda_kernel.kept(small) == cubin
    assert len(made) == 2, "it is whole, and alone in its folder"
    assert list(cache.iterdir()) == [file]


@pytest.mark.parametrize(
    ("refusal", "again"),
    [
        ("CUDA: CUDA_ERROR_INVALID_IMAGE (200)", True),
        ("CUDA: CUDA_ERROR_NO_BINARY_FOR_GPU (209)", True),
        ("CUDA: CUDA_ERROR_NOT_FOUND (500)", True),
        ("CUDA: CUDA_ERROR_OUT_OF_MEMORY (2)", False),
        ("CUDA: CUDA_ERROR_ILLEGAL_ADDRESS (700)", False),
    ],
)
def test_a_cubin_that_the_driver_refuses_is_compiled_anew(
    small: CudaSource, made: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch, refusal: str, again: bool
) -> None:
    """Whatever wrote it. A device that has no memory, or is gone, has refused no file."""
    good = cuda_kernel.kept(small)
    (file,) = cache.iterdir()
    file.write_bytes(sealed(b"\x7fELF of another GPU"))
    shipped = cache.parent / "shipped" / file.name
    write_whole(shipped, sealed(b"\x7fELF of a third"))

    def load(_: CudaSource, cubin: bytes) -> str:
        if cubin != good:
            raise RuntimeError(refusal)
        return "a function"

    monkeypatch.setattr(cuda_kernel, "_load", load)
    if again:
        assert cuda_kernel._loaded.__wrapped__(small, 0) == "a function"
        assert unsealed(file.read_bytes()) == good
        assert cuda_kernel._loaded.__wrapped__(small, 0) == "a function"
        assert len(made) == 2, "what is shipped is refused as well, and the cache has it"
    else:
        with pytest.raises(RuntimeError, match="CUDA_ERROR"):
            cuda_kernel._loaded.__wrapped__(small, 0)
        assert len(made) == 1


@pytest.mark.parametrize("damage", [pytest.param(name, marks=ON_GPU) for name in (*DAMAGES, "of no GPU")])
def test_a_gpu_starts_over_a_damaged_cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    (tmp_path / "small.cu").write_text('extern "C" __global__ void small(int* out) { *out = 7; }')
    monkeypatch.setattr(cuda_kernel, "FOLDER", tmp_path)
    torch.zeros(1, device="cuda")
    major, minor = torch.cuda.get_device_capability()
    source = CudaSource("small.cu", "small", f"sm_{major}{minor}")
    cuda_kernel.kept(source)
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    file.write_bytes(DAMAGES[damage](whole) if damage in DAMAGES else sealed(b"\x7fELF" + bytes(4096)))
    cuda_kernel._loaded.cache_clear()
    assert cuda_kernel._loaded(source, 0) is not None
    assert unsealed(file.read_bytes()) is not None
    assert len(file.read_bytes()) == len(whole)


def entry(key: str = "KEY", kind: type[CheckedCache] = CheckedCache) -> CheckedCache:
    """A kernel and a launcher, as Triton puts them."""
    made = kind(key)
    group = {name: made.put(data, name) for name, data in (("a.json", '{"shared": 0}'), ("a.cubin", b"\x7fELF" * 9))}
    made.put_group("a.json", group)
    made.put(b"\x7fELF of a library", LIBRARY)
    return made


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["__grp__a.json", "a.json", "a.cubin", LIBRARY])
def test_a_damaged_file_of_tritons_is_missing_until_it_is_put_again(cache: Path, name: str, damage: str) -> None:
    entry()
    file = cache / "KEY" / name
    before = file.read_bytes()
    assert sorted(CheckedCache("KEY").get_group("a.json") or ()) == ["a.cubin", "a.json"]
    assert CheckedCache("KEY").get_file(LIBRARY) == str(cache / "KEY" / LIBRARY)
    at_a_digest = name.startswith("__grp__") and damage == "a byte flipped"
    file.write_bytes(before[:-20] + flipped(before[-20:]) if at_a_digest else DAMAGES[damage](before))
    if name == LIBRARY:
        assert CheckedCache("KEY").get_file(LIBRARY) is None
    else:
        assert CheckedCache("KEY").get_group("a.json") is None
    entry()
    assert file.read_bytes() == before
    assert CheckedCache("KEY").get_group("a.json")
    assert sorted(each.name for each in (cache / "KEY").iterdir()) == sorted(
        ["__grp__a.json", "a.json", "a.cubin", LIBRARY]
    )


def test_files_of_the_release_before_are_compiled_anew_and_it_reads_ours(cache: Path) -> None:
    """Unless they came with the program: images are what they were built as."""
    from triton.runtime.cache import FileCacheManager

    old = FileCacheManager("KEY")
    old.put_group("a.json", {"a.json": old.put("{}", "a.json"), "a.cubin": old.put(b"\x7fELF", "a.cubin")})
    old.put(b"\x7fELF", LIBRARY)
    assert CheckedCache("KEY").get_group("a.json") is None
    assert CheckedCache("KEY").get_file(LIBRARY) is None
    cache.rename(cache.parent / "shipped")
    assert sorted(ShippedFirst("KEY").get_group("a.json") or ()) == ["a.cubin", "a.json"]
    assert ShippedFirst("KEY").get_file(LIBRARY) is not None
    entry("OTHER")
    assert sorted(FileCacheManager("OTHER").get_group("a.json") or ()) == ["a.cubin", "a.json"]


def test_what_is_shipped_damaged_is_made_once(cache: Path) -> None:
    entry()
    cache.rename(cache.parent / "shipped")
    file = cache.parent / "shipped" / "KEY" / "a.cubin"
    file.write_bytes(flipped(file.read_bytes()))
    assert ShippedFirst("KEY").get_group("a.json") is None
    entry(kind=ShippedFirst)
    assert (ShippedFirst("KEY").get_group("a.json") or {})["a.cubin"] == str(cache / "KEY" / "a.cubin")


REAL = """
import json, sys
from pathlib import Path
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from modelserve_worker.kernels.compiling.kernel_cache import ShippedFirst
triton.knobs.cache.manager_class = ShippedFirst
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
@triton.jit
def copy(source, target, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target + at, tl.load(source + at))
def compile():
    source = ASTSource(copy, {"source": "*fp32", "target": "*fp32", "COUNT": "constexpr"}, {"COUNT": 64})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).kernel
first = compile()
(folder,) = Path(sys.argv[1]).iterdir()
for suffix in ("cubin", "ttir", "json"):
    for file in sorted(folder.glob(f"*.{suffix}")):
        for damaged in (file.read_bytes()[:40], bytes(file.stat().st_size)):
            file.write_bytes(damaged)
            assert compile() == first, file
            assert compile() == first, file
print(json.dumps(hits))
"""


def test_triton_compiles_a_damaged_kernel_anew(tmp_path: Path) -> None:
    """Its note, its metadata, its cubin and a text beside them: each is met by the start behind it, and healed."""
    (tmp_path / "real.py").write_text(REAL)
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "real.py"), str(tmp_path / "cache")],
        env=variables | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [False] + [False, True] * 8


@pytest.mark.parametrize(
    ("user", "group", "mode", "reason"),
    [
        pytest.param(OURS, OURS, 0o755, None, id="ours"),
        pytest.param(0, 0, 0o755, None, id="root's"),
        pytest.param(0, FS_GROUP, 0o2775, None, id="a volume as the kubelet makes it for an fsGroup"),
        pytest.param(FOREIGN, FS_GROUP, 0o2775, None, id="of another pod with the same fsGroup"),
        pytest.param(0, 0, 0o777, "anybody may write it (mode 0777)", id="anybody's"),
        pytest.param(OURS, OURS, 0o1777, "anybody may write it (mode 1777)", id="anybody's, with a sticky bit"),
        pytest.param(FOREIGN, FOREIGN, 0o755, "it is of user 1234 and group 1234", id="somebody else's"),
        pytest.param(OURS, FOREIGN, 0o775, "members of group 1234 may write it", id="another group may write it"),
        pytest.param(OURS, FOREIGN, 0o755, None, id="another group may read it"),
    ],
)
def test_who_could_write_what_is_run(
    monkeypatch: pytest.MonkeyPatch, user: int, group: int, mode: int, reason: str | None
) -> None:
    _be(monkeypatch)
    said = distrust(SimpleNamespace(st_mode=stat.S_IFDIR | mode, st_uid=user, st_gid=group))  # type: ignore[arg-type]
    assert (said is None) is (reason is None)
    assert reason is None or (said or "").startswith(reason)


def _be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod of the product: a user and a group of its own, and an fsGroup."""
    monkeypatch.setattr(os, "geteuid", lambda: OURS)
    monkeypatch.setattr(os, "getegid", lambda: OURS)
    monkeypatch.setattr(os, "getgroups", lambda: [FS_GROUP])


def test_a_cache_that_anybody_may_write_is_replaced_for_this_process_and_those_that_it_starts(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry()
    cache.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        settle_cache_folder()
    named = Path(os.environ[FOLDER_VARIABLE])
    assert named != cache
    assert "anybody may write it (mode 0777)" in caplog.text
    assert "chmod o-w" in caplog.text
    assert stat.S_IMODE(named.stat().st_mode) == 0o700
    assert CheckedCache("KEY").get_group("a.json") is None, "nothing of it is run"
    assert folder_fault(named) is None
    settle_cache_folder()
    assert os.environ[FOLDER_VARIABLE] == str(named)


@AS_ROOT
@pytest.mark.parametrize("what", ["a.cubin", LIBRARY, "of nvrtc", "."])
def test_a_file_of_somebody_else_inside_is_not_run(
    cache: Path, small: CudaSource, made: list[str], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    entry()
    good = cuda_kernel.kept(small)
    (cubin,) = cache.glob("*.cubin")
    path = cubin if what == "of nvrtc" else cache / "KEY" / what
    if path == cubin:
        path.write_bytes(sealed(b"\x7fELF of somebody else"))
    os.chown(path, FOREIGN, FOREIGN)
    group, library = CheckedCache("KEY").get_group("a.json"), CheckedCache("KEY").get_file(LIBRARY)
    assert (group is None) is (what in ("a.cubin", "."))
    assert (library is None) is (what in (LIBRARY, "."))
    assert cuda_kernel.kept(small) == good
    assert len(made) == (2 if what == "of nvrtc" else 1)
    assert f"{path} is not used: it is of user 1234" in caplog.text


AS_USER = """
import os, sys
from pathlib import Path
from modelserve_worker.kernels.compiling.cache_folder import cache_folder, folder_fault
from modelserve_worker.kernels.compiling.kernel_cache import CheckedCache
user, group = int(sys.argv[1]), int(sys.argv[2])
os.setgroups([group]); os.setresgid(user, user, user); os.setresuid(user, user, user); os.umask(0o022)
assert folder_fault(cache_folder()) is None, folder_fault(cache_folder())
for step in sys.argv[3:]:
    key, what = step.split(":")
    cache = CheckedCache(key)
    if what == "put":
        cache.put_group("a.json", {name: cache.put(data, name) for name, data in (("a.json", "{}"), ("b", b"b"))})
        assert cache.cache_dir.startswith(str(cache_folder())), cache.cache_dir
    elif what == "half":
        cache.put(b"b", "b")
    elif what == "break":
        (cache_folder() / key / "b").write_bytes(b"c")
    else:
        assert (cache.get_group("a.json") is not None) is (what == "hit"), step
"""


@AS_ROOT
def test_pods_of_two_users_share_a_volume_through_their_fs_group() -> None:
    """The kubelet makes the folder for root and the group. Each reads what the other made, goes on with what it left
    half-made, and heals what it left damaged; a third one, of another group, takes none of it."""
    with tempfile.TemporaryDirectory() as above:
        Path(above).chmod(0o755)
        folder = Path(above, "kernels")
        folder.mkdir()
        os.chown(folder, 0, FS_GROUP)
        folder.chmod(0o2775)
        _share(folder)


def _share(folder: Path) -> None:
    def pod(user: int, *steps: str, group: int = FS_GROUP) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", AS_USER, str(user), str(group), *steps],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), FOLDER_VARIABLE: str(folder)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    for user, *steps in (
        (OURS, "A:put", "B:half", "C:put", "C:break", "C:miss"),
        (FOREIGN, "A:hit", "B:miss", "B:put", "B:hit", "C:miss", "C:put", "D:put"),
        (OURS, "A:hit", "B:hit", "C:hit", "D:hit"),
    ):
        done = pod(user, *steps)
        assert done.returncode == 0, done.stderr[-2000:]
    other = pod(4321, group=4321)
    assert "members of group 5000 may write it" in other.stderr


def test_a_folder_that_takes_no_more_costs_compilations_and_no_start(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from modelserve_worker.kernels.compiling import kernel_cache

    honest = kernel_cache.write_whole

    def full(path: Path, data: bytes) -> None:
        if path.is_relative_to(cache):
            raise OSError(28, "No space left on device")
        honest(path, data)

    monkeypatch.setattr(kernel_cache, "write_whole", full)
    made = entry()
    assert "No space left on device" in caplog.text
    assert not made.cache_dir.startswith(str(cache))
    group: Any = CheckedCache("KEY").get_group("a.json")
    assert Path(group["a.cubin"]).read_bytes() == b"\x7fELF" * 9


def test_a_file_is_written_whole_or_not_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are on the disk before its name says so, and the name before anybody goes on."""
    done: list[str] = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(f"sync {_kind(handle)}"), sync(handle))[1])
    monkeypatch.setattr(Path, "replace", lambda part, path: (done.append("replace"), replace(part, path))[1])
    write_whole(cache / "file", b"first")
    assert done == ["sync file", "replace", "sync folder"]

    def fails(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        write_whole(cache / "file", b"second")
    assert trusted_bytes(cache / "file") == b"first"
    assert [each.name for each in cache.iterdir()] == ["file"]


def _kind(handle: int) -> str:
    return "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
