"""Reasons of a ModelAdapter's conditions. They are API: CamelCase, stable, documented here and nowhere else."""

from __future__ import annotations

from enum import StrEnum


class AdapterReason(StrEnum):
    # Accepted
    VALID = "Valid"
    INVALID_SPEC = "InvalidSpec"  # the message names the field
    REFERENCE_NOT_GRANTED = "ReferenceNotGranted"  # the ModelServe's namespace has no ReferenceGrant for this one
    MODEL_NOT_FOUND = "ModelServeNotFound"
    MODEL_INVALID = "ModelServeInvalid"  # its spec cannot be read: its adapters stay as they are
    NOT_ENABLED = "AdaptersNotEnabled"  # the ModelServe has no spec.adapters
    NOT_ALLOWED = "NotAllowed"  # the installation does not allow its namespace the address
    CLAIM_NOT_MOUNTED = "ClaimNotMounted"  # the workers do not mount the claim of a pvc:// address
    SECRET_UNREADABLE = "SecretUnreadable"  # noqa: S105 - the operator may not read it, or it, or its key, is not there
    NAME_TAKEN = "NameTaken"  # an older adapter, or the model, is served under the name
    TOO_MANY = "TooManyAdapters"  # spec.adapters.max of the ModelServe holds no more; the oldest stay

    # Ready
    SERVING = "Serving"
    SHARED = "Shared"  # both versions are served, as spec.rollout.weight says
    LOADING = "Loading"
    ROLLING_OUT = "RollingOut"  # the new version loads, or a worker still answers by the weights before
    NO_ROOM_FOR_ROLLOUT = "NoRoomForRollout"  # spec.adapters.max holds no second version of it
    NO_WORKERS = "NoWorkers"  # none of the ModelServe's is there yet
    WORKERS_UNREACHABLE = "WorkersUnreachable"  # the operator cannot ask a ready worker
    WORKERS_REFUSE = "WorkersRefuse"  # a worker does not take the set; its words
    WORKERS_WITHOUT = "WorkersWithoutAdapters"  # a worker was started without room for adapters
    LOAD_FAILED = "LoadFailed"  # the files cannot be had, or do not bind; the worker's words
    NO_EFFECT = "NoEffect"  # it loads and changes nothing
    PARTLY_NO_EFFECT = "PartlyNoEffect"  # modules of it change nothing
    DRAINING = "Draining"  # it is being deleted

    DRAIN_ABANDONED = "DrainAbandoned"  # of an Event: its time to drain was over, and a worker had not answered
