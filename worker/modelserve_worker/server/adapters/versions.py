"""One version of an adapter on this server: what it is, how far it is, and who uses it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

from modelserve.errors import ModelServeError
from modelserve_worker.request import AdapterStrength
from modelserve_worker.server.adapters.desired import DesiredVersion


class AdapterState(StrEnum):
    """As the operator reads them."""

    LOADING = "Loading"
    READY = "Ready"
    FAILED = "Failed"
    NO_EFFECT = "NoEffect"
    PARTLY_NO_EFFECT = "PartlyNoEffect"
    DRAINING = "Draining"  # it takes no request; those that it has are finished


@dataclass(frozen=True)
class ProbeResult:
    """How far answers are from the base's: `kl` in nats a place, the share of places whose likeliest token is another
    one, and the same of the base between two runs of it. `strengths`: of its terms."""

    kl: float
    top1_changed: float
    prompts: int
    base_kl: float = 0.0
    strengths: tuple[AdapterStrength, ...] = ()

    @property
    def by_linear(self) -> dict[str, float]:
        """The median over layers, of kinds of which something is known."""
        found: dict[str, list[float]] = {}
        for each in self.strengths:
            if each.ratio is not None:
                found.setdefault(each.linear, []).append(each.ratio)
        return {linear: median(ratios) for linear, ratios in found.items()}

    def document(self) -> dict[str, Any]:
        """Strengths have three digits; of what is in no layer the name is "model"."""
        layers: dict[str, dict[str, float | None]] = {}
        for each in self.strengths:
            layer = "model" if each.layer is None else str(each.layer)
            layers.setdefault(each.linear, {})[layer] = None if each.ratio is None else _short(each.ratio)
        return {
            "kl": self.kl,
            "top1Changed": self.top1_changed,
            "prompts": self.prompts,
            "baseKl": self.base_kl,
            "strength": {linear: _short(ratio) for linear, ratio in self.by_linear.items()},
            "strengthByLayer": layers,
        }


def _short(ratio: float) -> float:
    return float(f"{ratio:.3g}")


class AdapterFault(ModelServeError):  # noqa: N818 - a state of the adapter that others read
    """Why a version does not serve: `reason` in one word, for programs. `passing`: another try may help."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        state: AdapterState = AdapterState.FAILED,
        passing: bool = False,
        probe: ProbeResult | None = None,
    ) -> None:
        super().__init__(message)
        self.reason, self.state, self.passing, self.probe = reason, state, passing, probe


@dataclass(eq=False)
class AdapterVersion:
    """Written by the loop of the server; counts by the registry, under its lock. `managed`: of the operator's set."""

    name: str
    wanted: DesiredVersion
    managed: bool = True
    state: AdapterState = AdapterState.LOADING
    reason: str | None = None
    message: str | None = None
    digest: str | None = None
    rank: int | None = None
    nbytes: int = 0
    probe: ProbeResult | None = None
    load_seconds: float | None = None
    pinned: bool = False  # it keeps its place in device memory
    pinned_in_vain: bool = False  # it was to, and as many do as may
    open: int = field(default=0, kw_only=True)  # requests that have not ended
    running: int = field(default=0, kw_only=True)  # of these, those that have left the queue
    total: int = field(default=0, kw_only=True)  # that have left it since the start

    def become(self, state: AdapterState, reason: str | None = None, message: str | None = None) -> None:
        self.state, self.reason, self.message = state, reason, message

    def document(self) -> dict[str, Any]:
        """As GET /v1/adapters shows it: never the token."""
        return {
            "name": self.name,
            "id": self.wanted.id,
            "uri": self.wanted.uri,
            "revision": self.wanted.revision,
            "weight": self.wanted.weight,
            "pin": self.wanted.pin,
            "pinned": self.pinned,
            "state": self.state.value,
            "reason": self.reason,
            "message": self.message,
            "digest": self.digest,
            "rank": self.rank,
            "bytes": self.nbytes,
            "probe": None if self.probe is None else self.probe.document(),
            "requests": self.open,
        }
