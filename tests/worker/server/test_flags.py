"""EngineArgs from a file and flags: flags win, unknown names and wrong values are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve_worker.server.flags import (
    FlagParser,
    add_engine_flags,
    add_server_flags,
    engine_args,
    server_settings,
)
from modelserve_worker.server.settings import ServerSettings


def _args(*arguments: str) -> EngineArgs:
    parser = FlagParser(prog="serve", allow_abbrev=False)
    add_engine_flags(parser)
    flags = vars(parser.parse_args(arguments))
    return engine_args({name: value for name, value in flags.items() if name != "config"}, flags["config"])


def test_flags_set_typed_fields() -> None:
    args = _args(
        "--model", "/m", "--served-model-name", "g", "--host", "::", "--port", "0", "--device", "cpu",
        "--tensor-parallel-size", "2", "--max-model-len", "4096", "--kv-cache-dtype", "int8",
        "--kv-cache-layout", "v_only", "--gpu-memory-utilization", "0.5", "--max-num-batched-tokens", "512",
        "--max-num-seqs", "8", "--load-format", "dummy", "--no-prefix-caching", "--debug-kv-stamps",
    )  # fmt: skip
    assert (args.max_model_len, args.kv_cache_dtype, args.gpu_memory_utilization) == (4096, "int8", 0.5)
    assert (args.tensor_parallel_size, args.load_format, args.prefix_caching) == (2, "dummy", False)
    assert (args.debug_kv_stamps, args.host, args.port) == (True, "::", 0)
    assert _args("--model", "/m", "--max-model-len", "auto") == EngineArgs(model="/m")


def test_several_names_from_flags_and_files(tmp_path: Path) -> None:
    assert _args("--model", "/m").served_names == ()
    assert _args("--model", "/m", "--served-model-name", "a").served_names == ("a",)
    assert _args("--served-model-name", "a", "b/c", "--model", "/m").served_names == ("a", "b/c")
    config = tmp_path / "engine.yaml"
    for document, names in (("a", ("a",)), ("[a, b]", ("a", "b"))):
        config.write_text(f"model: /m\nservedModelName: {document}\n")
        assert _args("--config", str(config)).served_names == names
    for wrong in ("[]", "[a, a]", '[a, ""]'):
        config.write_text(f"model: /m\nservedModelName: {wrong}\n")
        with pytest.raises(InvalidInput, match=r"servedModelName: .*missing, empty or the same twice"):
            _args("--config", str(config))


@pytest.mark.parametrize("name", ["maxModelLen", "max_model_len"])
def test_flags_win_over_the_file(tmp_path: Path, name: str) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text(f"model: /m\n{name}: 8192\nmaxNumSeqs: 4\n")
    assert _args("--config", str(config)).max_model_len == 8192
    both = _args("--config", str(config), "--max-model-len", "1024")
    assert (both.max_model_len, both.max_num_seqs, both.model) == (1024, 4, "/m")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("model: /m\nmaxModelLength: 5", "maxModelLength: no such setting; known are model, servedModelName"),
        ("model: /m\nport: 70000", "port: Input should be less than or equal to 65535, not 70000"),
        ("model: /m\nkvCacheDtype: int4", "kvCacheDtype: .*, not 'int4'"),
        ("maxModelLen: 5", "no model given: use --model DIR"),
        ("- model", "must hold a YAML mapping"),
        ("model: [", "cannot be read"),
    ],
)
def test_wrong_files_are_explained(tmp_path: Path, document: str, message: str) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text(document)
    with pytest.raises(InvalidInput, match=message):
        _args("--config", str(config))


@pytest.mark.parametrize("arguments", [["--model"], ["--max-model", "5"], ["stray"]])
def test_wrong_command_lines_are_input_errors(arguments: list[str]) -> None:
    with pytest.raises(InvalidInput, match="--help"):
        _args(*arguments)


def test_the_server_has_flags_of_its_own(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key\n")
    parser = FlagParser(prog="x")
    add_server_flags(parser)
    given = [
        "--api-key",
        "a",
        "--api-key",
        "b",
        "--strict-fields",
        "--access-log",
        "json",
        "--allowed-origin",
        "https://a",
    ]
    settings = server_settings(vars(parser.parse_args(given)), {"MODELSERVE_API_KEY_FILE": str(keys)})
    assert (settings.api_keys, settings.api_key_file, settings.strict_fields) == (("a", "b"), keys, True)
    assert (settings.access_log, settings.allowed_origins) == ("json", ("https://a",))
    assert server_settings({}, {}) == ServerSettings()
    for flags, environment, message in (
        ({"access_log": "xml"}, {}, "access_log: Input should be 'text', 'json' or 'off', not 'xml'"),
        ({"body_seconds": "0"}, {}, "body_seconds: Input should be greater than 0, not '0'"),
        ({}, {"MODELSERVE_API_KEY_FILE": str(tmp_path / "nowhere")}, "No such file"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(message)):
            server_settings(flags, environment)
