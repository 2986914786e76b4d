"""Ends a process's tasks together: when the first one ends, or at a signal, also before kopf listens for it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


async def until_first_ends(*tasks: asyncio.Task[None]) -> None:
    """None of these ends by itself but the watches: kopf listens for signals. What one raises ends the process."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def until_signal(work: Coroutine[Any, Any, None]) -> None:
    """`work`, ended by a signal also before kopf runs; from then on it is kopf that hears signals."""
    running = asyncio.current_task()
    assert running is not None
    stopped = asyncio.Event()

    def stop() -> None:
        stopped.set()
        running.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await work
    except asyncio.CancelledError:
        if not stopped.is_set():
            raise
