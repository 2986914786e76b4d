"""Why an image or a sound of a request is refused. Each is its client's doing and costs that one's request."""

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
    """No image or sound of a served format, or a broken one, or one that took more memory or time than decoding may."""

    code = "media_undecodable"


class MediaUrlRefused(MediaError):  # noqa: N818
    """An address that nothing is fetched from."""

    code = "media_url_refused"


class MediaFetchFailed(MediaError):  # noqa: N818
    """An address that may be fetched, and gave nothing of use in time."""

    code = "media_fetch_failed"


class AudioTooLong(MediaError):  # noqa: N818
    """A sound of more seconds than the model hears at a time."""

    code = "audio_too_long"


class AudioTooShort(MediaError):  # noqa: N818
    """A sound of fewer samples than a row of the prompt is made of."""

    code = "audio_too_short"
