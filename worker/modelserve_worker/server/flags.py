"""EngineArgs from a YAML file and from flags: one flag per field, and flags win."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve_worker.server.http.authentication import ApiKeys
from modelserve_worker.server.settings import ServerSettings

API_KEY_FILE_VARIABLE, ADAPTERS_VARIABLE = "MODELSERVE_API_KEY_FILE", "MODELSERVE_ADAPTERS_DIR"


class FlagParser(argparse.ArgumentParser):
    """Reports a wrong command line as InvalidInput, so that it ends like every other wrong setting."""

    def error(self, message: str) -> NoReturn:
        raise InvalidInput(f"{message}; `{self.prog} --help` lists the flags")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add --config and `--max-model-len` for `max_model_len`, and so on. A flag not given sets nothing."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="EngineArgs as YAML; flags win over it")
    for name, field in EngineArgs.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        if field.annotation in (bool, bool | None):
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=field.description
            )
        else:
            several: dict[str, Any] = {"nargs": "+"} if list[str] in get_args(field.annotation) else {}
            parser.add_argument(flag, **several, default=argparse.SUPPRESS, metavar="VALUE", help=_help(field))


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ServerSettings; those that may be given several times have the name of one (`--api-key`)."""
    for name, field in ServerSettings.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        if field.annotation is bool:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=field.description
            )
        elif isinstance(field.default, tuple):
            parser.add_argument(
                flag.removesuffix("s"), dest=name, action="append", default=argparse.SUPPRESS, metavar="VALUE",
                help=f"{field.description} May be given several times.",
            )  # fmt: skip
        else:
            parser.add_argument(flag, default=argparse.SUPPRESS, metavar="VALUE", help=_help(field))


def server_settings(flags: Mapping[str, Any], environment: Mapping[str, str]) -> ServerSettings:
    """Settings from `flags` by field name; the file of keys may come as MODELSERVE_API_KEY_FILE, and the directory of
    the set of adapters as MODELSERVE_ADAPTERS_DIR.

    Raises InvalidInput that names the field.
    """
    document = dict(flags)
    for name, variable in (("api_key_file", API_KEY_FILE_VARIABLE), ("adapter_set_directory", ADAPTERS_VARIABLE)):
        if environment.get(variable):
            document.setdefault(name, environment[variable])
    try:
        settings = ServerSettings.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0])
        raise InvalidInput(f"{field}: {first['msg']}, not {first['input']!r}", field=field) from error
    ApiKeys(settings.api_keys, settings.api_key_file)  # a file that cannot be read is a wrong setting, at the start
    return settings


def _help(field: FieldInfo) -> str:
    default = "" if field.is_required() or field.default is None else f" (default {field.default})"
    return f"{field.description or ''}{default}".strip().replace("%", "%%")


def engine_args(flags: Mapping[str, Any], config: Path | None) -> EngineArgs:
    """`flags` by field name, over the document in `config`. Raises InvalidInput that names the field."""
    aliases = {name: field.alias or name for name, field in EngineArgs.model_fields.items()}
    document = _document(config) if config is not None else {}
    # One spelling per field, or a snake_case name in the file would stand beside the flag that replaces it.
    merged = {aliases.get(name, name): value for name, value in document.items()}
    merged |= {aliases[name]: value for name, value in flags.items()}
    if "model" not in merged:
        raise InvalidInput("no model given: use --model DIR, or `model: DIR` in the --config file", field="model")
    try:
        return EngineArgs.model_validate(merged)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            raise InvalidInput(
                f"{field}: no such setting; known are {', '.join(aliases.values())}", field=field
            ) from error
        raise InvalidInput(f"{field}: {first['msg']}, not {first['input']!r}", field=field) from error


def _document(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidInput(f"--config {path} cannot be read: {error}", field="config") from error
    if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
        raise InvalidInput(f"--config {path} must hold a YAML mapping of EngineArgs", field="config")
    return document
