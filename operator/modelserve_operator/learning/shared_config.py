"""The ConfigMaps of the operator's own namespace as they were last heard of: what workers measured, and the
cluster's own accelerators."""

from __future__ import annotations

from typing import Any

from modelserve.catalogue import CATALOGUE_NAME
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CONFIG_MAP, ResourceKind
from modelserve_operator.cluster.store import Body, version_of
from modelserve_operator.inventory.catalogue import Catalogue
from modelserve_operator.inventory.measurements import Measurements

CALIBRATION_NAME = "modelserve-calibration"


class SharedConfig:
    """Fed by gather; `learned` is also set by what was measured just now, before the cluster has it."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.names = (CALIBRATION_NAME, CATALOGUE_NAME)
        self.learned = Measurements()
        self.catalogue = Catalogue()
        self._heard: dict[str, tuple[int, dict[str, Any] | None]] = {}  # by name: version and data of the newest body

    def concerns(self, kind: ResourceKind, body: Body) -> bool:
        """Whether this object is one of the shared ConfigMaps."""
        metadata = body["metadata"]
        return kind is CONFIG_MAP and metadata.get("namespace") == self.namespace and metadata["name"] in self.names

    def note(self, name: str, body: Body | None) -> bool:
        """Take over a ConfigMap's state, None when it is absent. True when plans may depend on the difference.

        A speed that was measured anew concerns no plan that there is: it counts when one is made for another reason.
        """
        version, data = (0, None) if body is None else (version_of(body), body.get("data") or {})
        known_version, known_data = self._heard.get(name, (0, None))
        if 0 < version < known_version:
            return False  # an event that was overtaken
        self._heard[name] = (version, data)
        if data == known_data:
            return False
        if name == CALIBRATION_NAME:
            self.learned = Measurements.from_data(data or {})
            return self.learned.proposing != Measurements.from_data(known_data or {}).proposing
        self.catalogue = Catalogue.from_data(data or {})
        return True

    def wrote(self, body: Body) -> None:
        """Our own write: events of earlier versions are overtaken by it."""
        name = body["metadata"]["name"]
        version, data = self._heard.get(name, (0, None))
        self._heard[name] = (max(version, version_of(body)), data)

    def calibration_config_map(self, learned: Measurements) -> dict[str, Any]:
        """The ConfigMap that keeps `learned`. Deleting it, or an entry of it, makes the operator measure anew."""
        own = {
            labels.APP_NAME: "modelserve",
            labels.MANAGED_BY: labels.FIELD_MANAGER,
            labels.COMPONENT: labels.CALIBRATION,
        }
        metadata = {"name": CALIBRATION_NAME, "namespace": self.namespace, "labels": own}
        return {"metadata": metadata, "data": learned.to_data()}
