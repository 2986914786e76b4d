"""Images by address: which addresses, to whom a worker connects for them, and what a hostile host can do, which is
nothing but to have its own image refused. Hosts are stood in for by a server of this process."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from modelserve.sizing.media.image_urls import UrlHost, url_hosts
from modelserve_worker.media.fetching.image_fetcher import ImageFetcher, Streams
from modelserve_worker.media.fetching.place import place_of
from modelserve_worker.media.fetching.public_address import is_public
from modelserve_worker.media.media_error import MediaFetchFailed, MediaTooLarge, MediaUrlRefused

PUBLIC, OTHER = "93.184.216.34", "2606:2800:220:1::1"
METADATA = "169.254.169.254"
HOSTS = url_hosts(["images.example.com", "*.cdn.example.com", "http://plain.example.com"])
Says = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def ok(body: bytes, *headers: str) -> Says:
    head = "\r\n".join(["HTTP/1.1 200 OK", *(headers or [f"Content-Length: {len(body)}"]), "", ""])
    return said(head.encode() + body)


def moved(where: str, status: int = 302) -> Says:
    return said(f"HTTP/1.1 {status} Moved\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode())


def said(answer: bytes) -> Says:
    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    return say


class Internet:
    """Names with addresses, all of which lead to one server that says what its `paths` say."""

    def __init__(self, names: dict[str, list[str]], paths: dict[str, Says]) -> None:
        self.names, self.paths = names, paths
        self.resolved: list[str] = []
        self.connected: list[tuple[str, int, str, bool]] = []
        self.heads: list[str] = []
        self.port = 0

    async def resolve(self, name: str, port: int) -> Sequence[str]:
        self.resolved.append(name)
        return self.names[name]

    async def connect(self, address: str, port: int, tls: ssl.SSLContext | None, name: str) -> Streams:
        self.connected.append((address, port, name, tls is not None))
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=tls, server_hostname=name if tls else None)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            await self.paths[head.split(" ")[1].partition("?")[0]](reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def internet(
    paths: dict[str, Says], names: dict[str, list[str]] | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Internet]:
    names = names or {"plain.example.com": [PUBLIC], "images.example.com": [PUBLIC]}
    there = Internet(names, paths)
    server = await asyncio.start_server(there.serve, "127.0.0.1", 0, ssl=tls)
    there.port = server.sockets[0].getsockname()[1]
    try:
        yield there
    finally:
        server.close()


def fetcher(there: Internet, **settings: object) -> ImageFetcher:
    return ImageFetcher(HOSTS, resolve=there.resolve, connect=there.connect, **settings)  # type: ignore[arg-type]


async def fetch(there: Internet, url: str, *, most_bytes: int = 1000, **settings: object) -> bytes:
    return await fetcher(there, **settings).fetch(url, most_bytes=most_bytes, hold=lambda _: None)


PLAIN = "http://plain.example.com"


@pytest.mark.parametrize("entry", [
    "", "*", "*.com", "com", "localhost", "10.0.0.1", "[::1]", "images.example.com:8443", "images.example.com/a",
    "https://images.example.com", "Images.example.com", "a.*.example.com", "ex ample.com", "example.com.",
    "u@example.com", "-a.example.com", "x" * 300 + ".com",
])  # fmt: skip
def test_what_no_entry_of_the_list_is(entry: str) -> None:
    with pytest.raises(ValueError, match="is no host to fetch from"):
        UrlHost.parse(entry)


def test_entries_stand_once() -> None:
    with pytest.raises(ValueError, match="stands twice"):
        url_hosts(["a.example.com", "a.example.com"])


@pytest.mark.parametrize(("url", "words"), [
    ("http://images.example.com/a.png", "not fetched from there"),  # https is what is listed
    ("https://plain.example.com/a.png", "not fetched from there"),
    ("https://cdn.example.com/a.png", "not fetched from there"),  # *. is what is below
    ("https://evilcdn.example.com/a.png", "not fetched from there"),
    ("https://images.example.com.evil.net/a.png", "not fetched from there"),
    ("https://images.example.com./a.png", "not fetched from there"),
    ("https://169.254.169.254/latest/meta-data", "not fetched from there"),
    ("https://[::1]/", "not fetched from there"),
    ("https://2130706433/", "not fetched from there"),
    ("https://images.example.com:8443/a.png", "reached at port 443 alone"),
    ("http://plain.example.com:443/a.png", "reached at port 80 alone"),
    ("https://images.example.com:x/a.png", "is no address"),
    ("https://[::1/a.png", "is no address"),
    ("https://me:secret@images.example.com/a.png", "a user or a password"),
    ("https://images.example.com@evil.net/a.png", "a user or a password"),
    ("https://evil.net\\@images.example.com/a.png", "printable ASCII"),
    ("https://images.example.com/a b.png", "printable ASCII"),
    ("https://images.example.com/a\r\nHost: x", "printable ASCII"),
    ("https://images.example.com/\u00e4.png", "printable ASCII"),
    ("https://images.example.com/" + "a" * 8192, "the limit is 8192"),
    ("file:///etc/passwd", "not fetched from there"),
    ("ftp://images.example.com/a.png", "not fetched from there"),
    ("gopher://images.example.com/", "not fetched from there"),
    ("//images.example.com/a.png", "not fetched from there"),
])  # fmt: skip
def test_which_addresses_are_refused_unresolved(url: str, words: str) -> None:
    with pytest.raises(MediaUrlRefused, match=words) as refused:
        place_of(url, HOSTS)
    assert "secret" not in str(refused.value)


def test_what_an_address_says() -> None:
    place = place_of("HTTPS://A.b.CDN.example.com:443/x%20y?sig=s#part", HOSTS)
    assert (place.scheme, place.host, place.port, place.target) == ("https", "a.b.cdn.example.com", 443, "/x%20y?sig=s")
    assert "sig" not in place.shown, "queries are signatures"
    assert place_of("http://plain.example.com", HOSTS).target == "/"


@pytest.mark.parametrize("address", [
    "0.0.0.0", "0.1.2.3", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.9.9.9", METADATA,
    "168.63.129.16", "172.16.0.1", "172.31.255.255", "192.0.0.9", "192.0.2.1", "192.88.99.1", "192.168.1.1",
    "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::10.0.0.1", "::ffff:10.0.0.1", "::ffff:93.184.216.34", "::ffff:0:93.184.216.34",
    "64:ff9b::a9fe:a9fe", "64:ff9b::5db8:d822", "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:a9fe:a9fe::1",
    "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "2606:2800:220:1::1%1", "fec0::1",
    "ff02::1", "ff0e::1", "no address", "2130706433", "",
])  # fmt: skip
def test_addresses_that_are_not_anybodys(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", [PUBLIC, OTHER, "1.1.1.1", "8.8.8.8", "172.32.0.1", "2a00:1450:4001::1"])
def test_addresses_that_are(address: str) -> None:
    assert is_public(address)
    assert ipaddress.ip_address(address)


async def test_what_is_asked_and_of_whom() -> None:
    async with internet({"/a.png": ok(b"bytes")}) as there:
        assert await fetch(there, PLAIN + "/a.png?sig=1#x") == b"bytes"
    assert there.connected == [(PUBLIC, 80, "plain.example.com", False)]
    lines = there.heads[0].lower().split("\r\n")
    assert lines[0] == "get /a.png?sig=1 http/1.1"
    assert "host: plain.example.com" in lines
    assert "accept-encoding: identity" in lines
    assert not [line for line in lines if line.startswith(("authorization", "cookie"))]


@pytest.mark.parametrize("found", [
    [METADATA], ["127.0.0.1"], ["::ffff:93.184.216.34"], [PUBLIC, "10.0.0.1"], ["fd00:ec2::254", PUBLIC],
])  # fmt: skip
async def test_a_name_that_leads_inside_is_not_connected_to(found: list[str]) -> None:
    async with internet({}, {"images.example.com": found}) as there:
        with pytest.raises(MediaUrlRefused, match="leads to an address that is not public") as refused:
            await fetch(there, "https://images.example.com/a.png")
    assert there.connected == []
    assert not [each for each in found if each in str(refused.value)], "nobody is told what is inside"


async def test_a_name_is_resolved_once_and_what_was_found_is_connected_to() -> None:
    """A second answer, as of a name that is rebound, is not asked for; behind a redirect it is, and looked at again."""
    rebound = [[PUBLIC], [METADATA]]

    async with internet({"/a.png": ok(b"x"), "/b.png": moved("/a.png")}) as there:

        async def resolve(name: str, port: int) -> Sequence[str]:
            there.resolved.append(name)
            return rebound[min(len(there.resolved), len(rebound)) - 1]

        once = ImageFetcher(HOSTS, resolve=resolve, connect=there.connect)
        assert await once.fetch(PLAIN + "/a.png", most_bytes=9, hold=lambda _: None) == b"x"
        assert (there.resolved, [each[0] for each in there.connected]) == (["plain.example.com"], [PUBLIC])
        there.resolved.clear()
        with pytest.raises(MediaUrlRefused, match="not public"):
            await once.fetch(PLAIN + "/b.png", most_bytes=9, hold=lambda _: None)
        assert (len(there.resolved), len(there.connected)) == (2, 2)


@pytest.mark.parametrize(("where", "words"), [
    (f"http://{METADATA}/latest/meta-data/", "not fetched from there"),
    (f"//{METADATA}/", "not fetched from there"),
    ("https://evil.example.net/a.png", "not fetched from there"),
    ("file:///etc/passwd", "not fetched from there"),
    ("http://plain.example.com:8000/", "port 80 alone"),
    ("http://me:pw@plain.example.com/", "a user or a password"),
])  # fmt: skip
async def test_redirects_are_looked_at_as_addresses_are(where: str, words: str) -> None:
    async with internet({"/a": moved(where)}) as there:
        with pytest.raises(MediaUrlRefused, match=words):
            await fetch(there, PLAIN + "/a")
    assert len(there.connected) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed_three_times(status: int) -> None:
    paths = {f"/{n}": moved(f"/{n + 1}", status) for n in range(4)} | {"/4": ok(b"there")}
    async with internet(paths) as there:
        assert await fetch(there, PLAIN + "/1") == b"there"
        with pytest.raises(MediaFetchFailed, match="redirected more than 3 times"):
            await fetch(there, PLAIN + "/0")


async def test_what_is_no_image_in_http() -> None:
    unfinished = said(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")
    cases: dict[str, tuple[Says, str]] = {
        "/404": (said(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"), "answers 404"),
        "/206": (said(b"HTTP/1.1 206 Partial\r\nContent-Length: 1\r\n\r\na"), "answers 206"),
        "/lost": (said(b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n"), "does not say where"),
        "/gzip": (ok(b"x", "Content-Encoding: gzip", "Content-Length: 1"), "in the encoding 'gzip'"),
        "/ssh": (said(b"SSH-2.0-OpenSSH_9\r\n\r\n"), "does not answer in HTTP"),
        "/nothing": (said(b""), "does not answer in HTTP"),
        "/short": (unfinished, "does not answer in HTTP"),
        "/head": (said(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000), "(no end of its head|does not answer in HTTP)"),
        "/interim": (said(b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000), "no end of its head"),
        "/crumbs": (ok(b"1\r\na\r\n" * 65_537 + b"0\r\n\r\n", "Transfer-Encoding: chunked"), "more than 65536 pieces"),
    }
    async with internet({path: says for path, (says, _) in cases.items()}) as there:
        for path, (_, words) in cases.items():
            with pytest.raises(MediaFetchFailed, match=words):
                await fetch(there, PLAIN + path, most_bytes=100_000)


async def test_bytes_are_bounded_while_they_come_and_told_before_they_are_kept() -> None:
    ended = asyncio.Event()

    async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(bytes(4096))
                await writer.drain()
        finally:
            ended.set()

    chunked = ok(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", "Transfer-Encoding: chunked")
    paths = {"/endless": endless, "/said": ok(b"", "Content-Length: 99999999"), "/chunked": chunked}
    async with internet(paths) as there:
        with pytest.raises(MediaTooLarge, match="has more than 50000 bytes"):
            await fetch(there, PLAIN + "/endless", most_bytes=50_000)
        await asyncio.wait_for(ended.wait(), 30)
        with pytest.raises(MediaTooLarge, match="has 99999999 bytes"):
            await fetch(there, PLAIN + "/said")
        held: list[int] = []
        assert await fetcher(there).fetch(PLAIN + "/chunked", most_bytes=5, hold=held.append) == b"abcde"
        assert held == [3, 2]

        def full(_: int) -> None:
            raise MediaTooLarge("all is taken")

        with pytest.raises(MediaTooLarge, match="all is taken"):
            await fetcher(there).fetch(PLAIN + "/chunked", most_bytes=5, hold=full)


@pytest.mark.parametrize("beginning", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"])
async def test_a_host_that_drips_has_so_long_and_its_connection_ends(beginning: bytes) -> None:
    ended = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(beginning)
        await reader.read()  # until the worker has gone
        ended.set()

    async with internet({"/slow": drip}) as there:
        with pytest.raises(MediaFetchFailed, match=r"did not come within 0\.2 s"):
            await fetch(there, PLAIN + "/slow", seconds=0.2)
        await asyncio.wait_for(ended.wait(), 30)


async def test_a_slow_host_has_its_own_places() -> None:
    """While its entry's are taken, another of that entry waits, and those of other entries do not."""
    go, reached = asyncio.Event(), asyncio.Event()

    async def late(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        await go.wait()
        await ok(b"late")(_, writer)

    names = {"plain.example.com": [PUBLIC], "fast.example.com": [PUBLIC]}
    async with internet({"/late": late, "/now": ok(b"now")}, names) as there:
        hosts = url_hosts(["http://plain.example.com", "http://fast.example.com"])
        shared = ImageFetcher(hosts, resolve=there.resolve, connect=there.connect, places=2, places_of_entry=1)

        async def of(url: str) -> bytes:
            return await shared.fetch(url, most_bytes=9, hold=lambda _: None)

        slow = asyncio.create_task(of(PLAIN + "/late"))
        await asyncio.wait_for(reached.wait(), 30)
        behind = asyncio.create_task(of(PLAIN + "/now"))
        assert [await of("http://fast.example.com/now") for _ in range(3)] == [b"now"] * 3
        assert not behind.done()
        assert len(there.connected) == 4
        go.set()
        assert (await slow, await behind) == (b"late", b"now")


async def test_the_next_address_is_tried_where_one_takes_no_connection() -> None:
    async with internet({"/a": ok(b"x")}, {"plain.example.com": [OTHER, PUBLIC]}) as there:

        async def connect(address: str, port: int, tls: ssl.SSLContext | None, name: str) -> Streams:
            if address == OTHER:
                raise ConnectionRefusedError(111, "Connection refused")
            return await there.connect(address, port, tls, name)

        either = ImageFetcher(HOSTS, resolve=there.resolve, connect=connect)
        assert await either.fetch(PLAIN + "/a", most_bytes=9, hold=lambda _: None) == b"x"
        there.names["plain.example.com"] = [OTHER]
        with pytest.raises(MediaFetchFailed, match="cannot be reached: Connection refused"):
            await either.fetch(PLAIN + "/a", most_bytes=9, hold=lambda _: None)
        there.names["plain.example.com"] = []
        with pytest.raises(MediaFetchFailed, match="the name has no address"):
            await either.fetch(PLAIN + "/a", most_bytes=9, hold=lambda _: None)


def certificate(directory: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server that is `name`, and of a client that trusts whoever signed it."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    builder = (
        x509.CertificateBuilder().subject_name(named).issuer_name(named).public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(usage, critical=True)
    )  # fmt: skip
    signed = builder.sign(key, hashes.SHA256())
    both = directory / f"{name}.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    both.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(both)
    client = ssl.create_default_context(cadata=signed.public_bytes(serialization.Encoding.PEM).decode())
    return server, client


async def test_tls_is_with_the_name_at_the_address_that_was_found(tmp_path: Path) -> None:
    server, client = certificate(tmp_path, "images.example.com")
    names = {"images.example.com": [OTHER], "a.cdn.example.com": [PUBLIC]}
    async with internet({"/a.png": ok(b"bytes")}, names, tls=server) as there:
        assert await fetch(there, "https://images.example.com/a.png", tls=client) == b"bytes"
        assert there.connected == [(OTHER, 443, "images.example.com", True)]
        with pytest.raises(MediaFetchFailed, match="its certificate is not valid: Hostname mismatch"):
            await fetch(there, "https://a.cdn.example.com/a.png", tls=client)
        with pytest.raises(MediaFetchFailed, match="its certificate is not valid: self"):
            await fetch(there, "https://images.example.com/a.png")
        assert len(there.heads) == 1, "nothing is said to a stranger"
