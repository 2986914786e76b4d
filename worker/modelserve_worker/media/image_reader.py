"""From an image's bytes to its patches: looked at first, which costs nothing, and decoded later, where it is not known.

How many soft tokens an image becomes follows from its header alone; the decoder makes just so many patches of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from modelserve.model.images import resized, soft_tokens
from modelserve.sizing.media.image_input import (
    ENCODED_BYTES,
    HELD_PIXELS_BYTES,
    KNOWN_PIXELS_BYTES,
    MOST_PIXELS,
    ImageInput,
)
from modelserve_worker.embedded_spans import KEY_BYTES, ImagePatches
from modelserve_worker.media.decode_order import DecodeOrder
from modelserve_worker.media.decode_pool import DecodePool
from modelserve_worker.media.fetching.image_fetcher import ImageFetcher
from modelserve_worker.media.image_header import read_image_header
from modelserve_worker.media.media_error import MediaTooLarge
from modelserve_worker.media.patches import patches_of

PREPROCESSOR = 1  # of cached rows: another number wherever the same bytes become other patches


class SentImage(NamedTuple):
    """An image within its bounds, not decoded. `key` is that of its rows."""

    data: bytes
    order: DecodeOrder
    soft_tokens: int
    key: bytes


class ImageReader:
    """Of one model with room for `images`. For any thread.

    `most_held_bytes`: pixels that open requests may have, which whoever reads them counts; `known_bytes`: of images
    that were decoded before; `fetcher`: of images by address, where any are fetched.
    """

    def __init__(
        self,
        images: ImageInput,
        pool: DecodePool,
        *,
        most_held_bytes: int = HELD_PIXELS_BYTES,
        known_bytes: int = KNOWN_PIXELS_BYTES,
        fetcher: ImageFetcher | None = None,
    ) -> None:
        self.images = images
        self.fetcher = fetcher
        self.most_held_bytes = most_held_bytes
        self.mutual = images.architecture.mutual
        self._side = images.architecture.patch_side
        self._pool = pool
        self._waiting = ThreadPoolExecutor(pool.processes, thread_name_prefix="images")
        self._known: OrderedDict[tuple[str, bytes], ImagePatches] = OrderedDict()  # the last used at the end
        self._room = known_bytes
        self._lock = threading.Lock()

    def look(self, data: bytes, budget: int) -> SentImage:
        """Bound it by its header. Raises MediaTooLarge and MediaUndecodable."""
        if len(data) > ENCODED_BYTES:
            raise MediaTooLarge(f"the image has {len(data)} bytes; the limit is {ENCODED_BYTES}: send it smaller")
        header = read_image_header(data)
        if header.pixels > MOST_PIXELS:
            raise MediaTooLarge(
                f"the image is {header.width} x {header.height}, {header.pixels} pixels; the limit is {MOST_PIXELS}: "
                "send it smaller, the model sees no more than 2.6 million of them"
            )
        made = {"budget": budget, "patch_side": self._side}
        height, width = resized(*header.turned, **made)
        digest = hashlib.sha256(hashlib.sha256(data).digest() + f"image {budget} {PREPROCESSOR}".encode()).digest()
        tokens = soft_tokens(*header.turned, **made)
        return SentImage(data, DecodeOrder(*header, height, width), tokens, digest[:KEY_BYTES])

    async def read(self, image: SentImage, namespace: str) -> ImagePatches:
        """`patches`, off the loop where it is not known. So many are decoded at a time, and the others wait."""
        if (known := self._find((namespace, image.key))) is not None:
            return known
        return await asyncio.get_running_loop().run_in_executor(self._waiting, self.patches, image, namespace)

    def patches(self, image: SentImage, namespace: str) -> ImagePatches:
        """Decode it, unless requests of the same `namespace` sent it lately. Raises MediaTooLarge and
        MediaUndecodable."""
        name = (namespace, image.key)
        if (known := self._find(name)) is not None:
            return known
        order = image.order
        rgb = self._pool.decode(image.data, order)
        assert len(rgb) == 3 * order.resized_height * order.resized_width, "another size than was asked for"
        made = patches_of(rgb, height=order.resized_height, width=order.resized_width, side=self._side)
        self._keep(name, made)
        return made

    def _keep(self, name: tuple[str, bytes], made: ImagePatches) -> None:
        size = made.values.nbytes
        with self._lock:
            if name in self._known:
                return
            while self._known and size > self._room:
                _, gone = self._known.popitem(last=False)
                self._room += gone.values.nbytes
            if size <= self._room:
                self._known[name] = made
                self._room -= size

    def _find(self, name: tuple[str, bytes]) -> ImagePatches | None:
        with self._lock:
            known = self._known.get(name)
            if known is not None:
                self._known.move_to_end(name)
            return known

    def is_known(self, image: SentImage, namespace: str) -> bool:
        with self._lock:
            return (namespace, image.key) in self._known

    def close(self) -> None:
        self._pool.close()
        if self.fetcher is not None:
            self.fetcher.close()
        self._waiting.shutdown(wait=False, cancel_futures=True)
