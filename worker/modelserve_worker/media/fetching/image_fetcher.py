"""Fetches images from hosts of a list: each name is resolved once, and only the public address found is connected to.

What a request may ask a worker to connect to is decided here: no proxy of the environment, no redirect that is not
looked at like the first address, and no connection that outlives its image.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urljoin

import h11

from modelserve.sizing.media.image_urls import FETCH_SECONDS, FETCHES, FETCHES_OF_ENTRY, REDIRECTS, UrlHost
from modelserve_worker.media.fetching.exchange import Answer, get
from modelserve_worker.media.fetching.place import Place, place_of
from modelserve_worker.media.fetching.public_address import is_public
from modelserve_worker.media.media_error import MediaFetchFailed, MediaUrlRefused

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Connect = Callable[[str, int, ssl.SSLContext | None, str], Awaitable[Streams]]
_TRIED = 4  # addresses of one name


async def connect_to(address: str, port: int, tls: ssl.SSLContext | None, name: str) -> Streams:
    """To an address in digits; TLS checks that whoever answers there is `name`."""
    return await asyncio.open_connection(address, port, ssl=tls, server_hostname=name if tls else None)


class SystemResolver:
    """Names by the system's resolver, in threads of their own: one that does not answer keeps nothing else waiting."""

    def __init__(self, threads: int = FETCHES) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="names")

    async def __call__(self, name: str, port: int) -> Sequence[str]:
        """Addresses in digits, each once, in the system's order. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._threads, lambda: socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(each[4][0]) for each in found))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class ImageFetcher:
    """Of `hosts`. For one event loop, but for `place`. `tls` None: the system's authorities."""

    def __init__(
        self,
        hosts: Sequence[UrlHost],
        *,
        resolve: Resolve | None = None,
        connect: Connect = connect_to,
        tls: ssl.SSLContext | None = None,
        seconds: float = FETCH_SECONDS,
        places: int = FETCHES,
        places_of_entry: int = FETCHES_OF_ENTRY,
    ) -> None:
        self.hosts = tuple(hosts)
        self._resolve: Resolve = resolve or SystemResolver()
        self._connect = connect
        self._tls = tls or ssl.create_default_context()
        self._seconds = seconds
        self._places = asyncio.Semaphore(places)
        self._places_of = {each: asyncio.Semaphore(places_of_entry) for each in self.hosts}

    def place(self, url: str) -> Place:
        """Where it would be fetched. For any thread. Raises MediaUrlRefused."""
        return place_of(url, self.hosts)

    async def fetch(self, url: str, *, most_bytes: int, hold: Callable[[int], None]) -> bytes:
        """The bytes, which are not looked at. `hold` is told of them before they are kept, and may raise.

        Raises MediaUrlRefused, MediaTooLarge and MediaFetchFailed.
        """
        place = first = self.place(url)
        try:
            async with asyncio.timeout(self._seconds), self._places_of[first.entry], self._places:
                for _ in range(1 + REDIRECTS):
                    answer = await self._get(place, most_bytes=most_bytes, hold=hold)
                    if answer.location is None:
                        return answer.data
                    place = self.place(urljoin(f"{place.scheme}://{place.host}{place.target}", answer.location))
        except TimeoutError as error:
            raise MediaFetchFailed(f"{first.shown!r} did not come within {self._seconds:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise MediaFetchFailed(f"{place.shown!r}: its certificate is not valid: {error.verify_message}") from error
        except h11.RemoteProtocolError as error:
            raise MediaFetchFailed(f"{place.shown!r} does not answer in HTTP: {error}") from error
        except OSError as error:
            raise MediaFetchFailed(f"{place.shown!r} cannot be reached: {error.strerror or error}") from error
        raise MediaFetchFailed(f"{first.shown!r} is redirected more than {REDIRECTS} times")

    async def _get(self, place: Place, *, most_bytes: int, hold: Callable[[int], None]) -> Answer:
        reader, writer = await self._connected(place)
        try:
            return await get(place, reader, writer, most_bytes=most_bytes, hold=hold)
        finally:
            writer.transport.abort()  # nobody waits for a host to say goodbye

    async def _connected(self, place: Place) -> Streams:
        """At the first of the name's addresses that takes a connection; none where one of them is not public."""
        addresses = await self._resolve(place.host, place.port)
        if not addresses:
            raise MediaFetchFailed(f"{place.shown!r}: the name has no address")
        if not all(map(is_public, addresses)):
            raise MediaUrlRefused(
                f"{place.shown!r}: the name leads to an address that is not public; only public ones are fetched from"
            )
        tls = self._tls if place.scheme == "https" else None
        failed: OSError | None = None
        for address in addresses[:_TRIED]:
            try:
                return await self._connect(address, place.port, tls, place.host)
            except ssl.SSLError:
                raise
            except OSError as error:
                failed = error
        assert failed is not None, "there was an address, and no connection to it"
        raise failed

    def close(self) -> None:
        if isinstance(self._resolve, SystemResolver):
            self._resolve.close()
