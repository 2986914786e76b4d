"""`modelserve-worker cache fill` and `cache free`: what the Jobs of a ModelCache run."""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from modelserve.caches.reports import CacheFailure, FilledCache, UnfilledCache, write_end
from modelserve.errors import InvalidInput
from modelserve.termination import TERMINAL_EXIT_CODE
from modelserve_tools.hub_client import AccessDeniedError, DownloadError, go_online
from modelserve_tools.model_cache.filling import NotWritableError, fill
from modelserve_tools.model_cache.progress import Progress, told_on
from modelserve_tools.model_cache.transfer import CacheFullError, HashMismatchError

PORT = 8000
_REASONS = {
    AccessDeniedError: CacheFailure.ACCESS_DENIED,
    CacheFullError: CacheFailure.CACHE_FULL,
    HashMismatchError: CacheFailure.HASH_MISMATCH,
    NotWritableError: CacheFailure.NOT_WRITABLE,
}

logger = logging.getLogger(__name__)


def main(
    argv: Sequence[str] | None = None,
    *,
    tell: Callable[[FilledCache | UnfilledCache], None] = write_end,
) -> int:
    """Exit 0 when it is done, 1 when another try may help, TERMINAL_EXIT_CODE when somebody has to change something."""
    parser = argparse.ArgumentParser(prog="modelserve-worker cache", description="Fill or free a cache of models.")
    commands = parser.add_subparsers(dest="command", required=True)
    filling = commands.add_parser("fill", help="fetch a model of the Hub into the cache, unless it is there")
    filling.add_argument("--uri", required=True, help="hf://OWNER/NAME, or hf://OWNER/NAME/FILE.gguf")
    filling.add_argument("--revision", default="main", help="branch, tag or commit (default: main)")
    filling.add_argument("--root", required=True, type=Path, help="folder of the cache; commits are folders in it")
    filling.add_argument("--keep", action="append", default=[], help="another commit that stays (may be repeated)")
    filling.add_argument("--verify", action="store_true", help="read and hash what is there, too")
    filling.add_argument("--connections", type=int, default=4, help="files at a time (default: 4)")
    filling.add_argument("--port", type=int, default=PORT, help="where progress is told (default: 8000)")
    freeing = commands.add_parser("free", help="remove the cache and all that is in it")
    freeing.add_argument("--root", required=True, type=Path, help="folder of the cache")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    go_online()
    try:
        if arguments.command == "free":
            return _free(arguments.root)
        progress = Progress()
        with told_on(arguments.port, progress):
            done = fill(
                arguments.uri,
                arguments.revision,
                arguments.root,
                keep=arguments.keep,
                verify=arguments.verify,
                connections=arguments.connections,
                progress=progress,
            )
    except InvalidInput as error:
        sys.stderr.write(f"{error}\n")
        reason = next((told for kind, told in _REASONS.items() if isinstance(error, kind)), None)
        tell(UnfilledCache(reason=reason or CacheFailure.MODEL_NOT_FOUND, message=str(error)))
        return TERMINAL_EXIT_CODE
    except DownloadError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    logger.info("%s is complete: %d bytes, of which %d were fetched", done.commit, done.bytes, done.fetched_bytes)
    tell(done)
    return 0


def _free(root: Path) -> int:
    """Exit 1 where something cannot be removed yet, as on a volume that hangs."""
    try:
        shutil.rmtree(root)
    except FileNotFoundError:
        logger.info("%s is not there", root)
    except OSError as error:
        sys.stderr.write(f"{root} cannot be removed: {error}\n")
        return 1
    return 0
