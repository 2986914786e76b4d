"""Condition types and reasons. Both are API: CamelCase, stable, documented here and nowhere else."""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    READY = "Ready"  # this generation's plan is fully rolled out
    AVAILABLE = "Available"  # some revision serves requests
    ACCEPTED = "Accepted"  # the spec is valid and can be acted on
    PLANNED = "Planned"  # a plan exists for the spec
    CAPACITY_AVAILABLE = "CapacityAvailable"  # every wanted pod has a node
    WEIGHTS_LOADED = "WeightsLoaded"  # every wanted pod of the planned revision has loaded its weights
    WORKERS_READY = "WorkersReady"  # every wanted pod of the planned revision is Ready
    CAPACITY_BUFFERED = "CapacityBuffered"  # an autoscaler keeps room for more; absent without spec.capacityBuffer
    ROUTED = "Routed"  # gateways lead requests to the workers; absent without spec.gateway
    RECONCILING = "Reconciling"  # the operator or the cluster is still working towards the spec; absent when not
    POOLS_GONE = "PoolsGone"  # nothing offers what the committed plan is for any more; absent when something does
    STALLED = "Stalled"  # nothing more will happen until the spec, the cluster or the model changes; absent when not


class Reason(StrEnum):
    # Accepted
    VALID = "Valid"
    INVALID_SPEC = "InvalidSpec"  # the spec contradicts itself; the message names the field and the limit
    NOT_ALLOWED = "NotAllowed"  # the installation does not allow its namespace what a field asks for
    VOLUME_NOT_SHAREABLE = "VolumeNotShareable"  # a ReadWriteOnce claim with more than one pod at a time
    NAME_CONFLICT = "NameConflict"  # an object of a name that the operator needs belongs to somebody else

    # a write that was refused: of CapacityAvailable for pods, else of Stalled and Ready
    POLICY_DENIED = "PolicyDenied"  # an admission policy, webhook or Pod Security
    QUOTA_EXCEEDED = "QuotaExceeded"
    FORBIDDEN = "Forbidden"  # RBAC, or a namespace that is being deleted
    WRITE_FAILED = "WriteFailed"  # the API server gave an error or no answer; tried again

    # Planned
    INSPECTING_MODEL = "InspectingModel"  # a Job reads the model's config.json and safetensors headers
    INSPECTION_FAILED = "InspectionFailed"  # that Job failed without a reason of its own
    CACHE_NOT_FOUND = "CacheNotFound"  # model.cache names no ModelCache of the namespace, or the installation has none
    CACHE_MISMATCH = "CacheMismatch"  # the ModelCache is of another address or revision
    WAITING_FOR_CACHE = "WaitingForCache"  # the ModelCache is not filled yet
    PLAN_COMMITTED = "PlanCommitted"
    PLAN_PREVIEWED = "PlanPreviewed"  # plan.mode PreviewOnly: a plan, no workloads
    WAITING_FOR_APPROVAL = "WaitingForApproval"  # plan.mode Manual: annotate with approve-plan
    NO_ACCELERATORS = "NoAccelerators"  # no node has a known accelerator and the spec declares none
    DOES_NOT_FIT = "DoesNotFit"  # no pool, existing or declared, can hold the model

    REVISION_UNREADABLE = "RevisionUnreadable"  # a revision that runs, or was committed last, cannot be read
    REVISION_UNKNOWN = "RevisionUnknown"  # spec.plan.revision names none that is kept

    MODEL_CHANGED = "ModelChanged"  # of an Event: the checkpoint's files are not those of the committed revision
    MODEL_UNPINNED = "ModelUnpinned"  # of an Event: an oci:// address names a tag and no digest
    REVISION_REFUSED = "RevisionRefused"  # of an Event: an object is labelled as a revision and is none of ours
    ANNOTATION_REFUSED = "AnnotationRefused"  # of an Event: a Deployment has annotations of ours that we did not write
    COMMITS_DIFFER = "CommitsDiffer"  # of an Event: a pod tells another commit of the model than its revision keeps
    UNKNOWN_FIELDS = "UnknownFields"  # of an Event: fields of the spec that only a later release knows
    DRAFTER_UNAVAILABLE = "DrafterUnavailable"  # of an Event: workers serve without the drafter that was asked for
    LOW_DRAFT_ACCEPTANCE = "LowDraftAcceptance"  # of an Event: for minutes hardly any draft is right
    SPOT_NOTICE = "SpotNotice"  # of an Event: nodes of the plan are reclaimed faster than its workers stop
    APPROVAL_UNKNOWN = "ApprovalUnknown"  # of an Event: an approved hash names no plan of the spec
    CATALOGUE_ENTRY_IGNORED = "CatalogueEntryIgnored"  # of an Event: an entry of modelserve-accelerators is wrong

    REPLANNED = "Replanned"  # of an Event: another plan was committed by spec.plan.replan; with why, and the changes
    REPLAN_UNDONE = "ReplanUndone"  # of an Event: that one failed while the old one served, which is committed again

    ROLLOUT_HALTED = "RolloutHalted"  # of an Event about the operator's Lease: the newer worker fails, so no more move
    CHANGED_BY_ADMISSION = "ChangedByAdmission"  # of an Event: a webhook changes what we write to a child

    # CapacityAvailable
    CAPACITY_SUFFICIENT = "CapacitySufficient"
    WAITING_FOR_NODES = "WaitingForNodes"  # pods are pending; the message is the scheduler's
    NO_SURGE_CAPACITY = "NoSurgeCapacity"  # the new revision has no room beside the old one, which stays
    POOLS_GONE = "PoolsGone"  # no node and no declared pool offers what the committed plan is for; of Stalled, too
    SCHEDULING_GATED = "SchedulingGated"  # pods carry scheduling gates: a queue has not let them in yet
    WAITING_FOR_QUOTA = "WaitingForQuota"  # pods wait for Kueue to admit them
    NOT_REQUESTED = "NotRequested"  # nothing asks for capacity (no plan, or zero replicas)

    # CapacityBuffered
    BUFFER_PROVISIONED = "BufferProvisioned"
    BUFFER_PROVISIONING = "BufferProvisioning"  # nodes are on their way, or cannot be had: the autoscaler's words
    BUFFER_NOT_READY = "BufferNotReady"  # the autoscaler cannot make placeholder pods; its words
    BUFFER_NOT_TAKEN_UP = "BufferNotTakenUp"  # no autoscaler has looked at it
    BUFFER_NOT_SERVED = "BufferNotServed"  # the cluster has no such API
    BUFFER_WITHHELD = "BufferWithheld"  # no plan to keep room for, or one whose workers fail
    BUFFER_REFUSED = "BufferRefused"  # it could not be written

    # Routed
    ROUTE_ACCEPTED = "RouteAccepted"
    ROUTE_NOT_ACCEPTED = "RouteNotAccepted"  # a gateway refuses the route or the pool; its words
    ROUTE_NOT_TAKEN_UP = "RouteNotTakenUp"  # not every gateway has looked at it
    ROUTE_REFUSED = "RouteRefused"  # it could not be written
    GATEWAY_NOT_SERVED = "GatewayNotServed"  # the cluster has no such API
    LIMITED_BY_QUOTAS = "LimitedByQuotas"  # the namespace's quota has no room for so many

    # WeightsLoaded, WorkersReady
    LOADING = "Loading"
    LOADED = "Loaded"
    ALL_READY = "AllReady"
    CONTEXT_REDUCED = "ContextReduced"  # ready, with a shorter context than planned: the pool came out smaller
    STARTING = "Starting"
    STOPPED = "Stopped"  # a terminal failure: growth stopped until the next attempt
    SCALED_TO_ZERO = "ScaledToZero"

    # Stalled, beside the reasons above and those of modelserve.termination.TerminationReason
    DRIFT_CONTESTED = "DriftContested"  # somebody changes a child again each time it is put right
    CRASH_LOOP = "CrashLoop"  # a worker keeps ending badly
    IMAGE_PULL_FAILED = "ImagePullFailed"
    POD_NOT_STARTING = "PodNotStarting"  # a pod has a node, but a volume, its network or a container cannot be made
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"  # workers have a node, but keep failing or never get ready

    # Available, Ready
    SERVING = "Serving"
    NOT_SERVING = "NotServing"
    ROLLED_OUT = "RolledOut"
    ROLLING_OUT = "RollingOut"
    BLOCKED = "Blocked"  # see Stalled


class Phase(StrEnum):
    """One word for a table column; never the contract."""

    PENDING = "Pending"
    INSPECTING = "Inspecting"
    PLANNED = "Planned"
    PROGRESSING = "Progressing"
    READY = "Ready"
    STALLED = "Stalled"
