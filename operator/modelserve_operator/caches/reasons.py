"""Reasons of a ModelCache's conditions. They are API: CamelCase, stable, documented here and nowhere else.

Those of `modelserve.caches.reports.CacheFailure` come beside them, as the fetching Job tells them.
"""

from __future__ import annotations

from enum import StrEnum


class CacheReason(StrEnum):
    # Accepted
    VALID = "Valid"
    INVALID_SPEC = "InvalidSpec"  # the message names the field
    CLAIM_NOT_FOUND = "ClaimNotFound"  # spec.storage.persistentVolumeClaim names none that is there
    NAME_CONFLICT = "NameConflict"  # a claim of the name that the operator would make is somebody else's

    # Ready
    FILLED = "Filled"  # ModelServes can read it
    FETCHING = "Fetching"
    QUEUED = "Queued"  # as many others are being fetched as the installation allows at a time
    FETCH_FAILED = "FetchFailed"  # the Job failed without a reason of its own; it is tried again
    WRITE_REFUSED = "WriteRefused"  # the API server does not take a Job or a claim; its words
    IN_USE = "InUse"  # being deleted, and ModelServes name it or read it
    FREEING = "Freeing"  # being deleted, and its bytes go first
    FREE_FAILED = "FreeFailed"  # its bytes cannot be removed; tried again

    FREE_ABANDONED = "FreeAbandoned"  # of an Event: the namespace goes, and its claims with it
    MOVED = "RevisionMoved"  # of an Event: the revision stands for another commit than before
    REPAIRED = "FilesRepaired"  # of an Event: files were damaged and were fetched anew
