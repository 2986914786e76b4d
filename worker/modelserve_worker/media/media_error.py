"""Why an image of a request is refused. Each is its client's doing, and costs that client's request alone."""

from __future__ import annotations


class MediaError(ValueError):
    """`code` is that of the answer; `param`, where it is known, the part of the request at fault."""

    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModalityNotServed(MediaError):  # noqa: N818 - as clients see it
    """This model, or this plan of it, takes no such input."""

    code = "modality_not_served"


class MediaTooLarge(MediaError):  # noqa: N818
    """More bytes, pixels, tokens or items than are served."""

    code = "media_too_large"


class MediaUndecodable(MediaError):  # noqa: N818
    """No image of a served format, or a broken one, or one that took more memory or time than decoding may."""

    code = "media_undecodable"


class MediaUrlRefused(MediaError):  # noqa: N818
    """An address that nothing is fetched from."""

    code = "media_url_refused"


class MediaFetchFailed(MediaError):  # noqa: N818
    """An address that may be fetched, and gave no image in time."""

    code = "media_fetch_failed"
