"""The ModelServe resource as pydantic models; the CRD is generated from them."""

from modelserve.api.modelserve import (
    API_VERSION,
    CATEGORIES,
    GROUP,
    KIND,
    PLURAL,
    SHORT_NAMES,
    SINGULAR,
    VERSION,
    ModelServe,
    ObjectMeta,
)
from modelserve.api.pod import PodOverrides
from modelserve.api.schema_types import Condition
from modelserve.api.spec import ModelServeSpec
from modelserve.api.status import (
    Calibration,
    CalibrationPages,
    CalibrationTerm,
    Candidate,
    Concurrency,
    GpuMemory,
    KVCachePlan,
    ModelServeStatus,
    NodeSelectorRequirement,
    NodeSelectorTerm,
    PlanStatus,
    RequestBytes,
)

__all__ = [
    "API_VERSION",
    "CATEGORIES",
    "GROUP",
    "KIND",
    "PLURAL",
    "SHORT_NAMES",
    "SINGULAR",
    "VERSION",
    "Calibration",
    "CalibrationPages",
    "CalibrationTerm",
    "Candidate",
    "Concurrency",
    "Condition",
    "GpuMemory",
    "KVCachePlan",
    "ModelServe",
    "ModelServeSpec",
    "ModelServeStatus",
    "NodeSelectorRequirement",
    "NodeSelectorTerm",
    "ObjectMeta",
    "PlanStatus",
    "PodOverrides",
    "RequestBytes",
]
