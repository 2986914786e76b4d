"""Brings the cluster's CRDs to this release's: `python -m modelserve_operator.crd_upgrade`, the chart's Job before an
install, an upgrade and a rollback.

A definition of a later release stays: it holds every object, and an older one would drop fields that are in use.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping
from typing import Any

from modelserve import __version__
from modelserve.crd import DEFINITIONS, MODEL_SERVES, RELEASE_ANNOTATION, Definition, custom_resource_definition
from modelserve.releases import release_number
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import DEFINITION
from modelserve_operator.cluster.kube import ClusterKube, Kube, KubeError

logger = logging.getLogger(__name__)

ESTABLISHED_SECONDS = 30


async def bring_up_to_date(kube: Kube, of: Definition = MODEL_SERVES) -> bool:
    """Make one of the cluster's CRDs this release's, whoever made it. False: it is of a later release, and stays.

    Raises KubeError, and TimeoutError when the API server does not serve it in time.
    """
    live = await kube.get(DEFINITION, namespace="", name=of.crd_name)
    found = labels.annotation_of(live, RELEASE_ANNOTATION) if live is not None else None
    if found is not None and release_number(found) > release_number(__version__):
        logger.info("CRD %s is of release %s, later than %s: left as it is", of.crd_name, found, __version__)
        return False
    wanted = custom_resource_definition(of=of)
    if live is None:
        live = await kube.apply(DEFINITION, {"metadata": wanted["metadata"], "spec": wanted["spec"]})
    else:  # replaced as a whole: an apply would leave fields that this release has dropped and somebody else once set
        annotations = {**(live["metadata"].get("annotations") or {}), RELEASE_ANNOTATION: __version__}
        operations = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": live["metadata"]["resourceVersion"]},
            {"op": "add", "path": "/metadata/annotations", "value": annotations},
            {"op": "replace", "path": "/spec", "value": wanted["spec"]},
        ]
        live = await kube.json_patch(DEFINITION, namespace="", name=of.crd_name, operations=operations)
    logger.info("CRD %s: release %s, before %s", of.crd_name, __version__, found or "none that is named")
    async with asyncio.timeout(ESTABLISHED_SECONDS):
        while not _established(live):
            await asyncio.sleep(0.5)
            live = await kube.get(DEFINITION, namespace="", name=of.crd_name) or {}
    return True


def _established(body: Mapping[str, Any]) -> bool:
    conditions = (body.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)


async def _run() -> None:
    async with ClusterKube(through_api_proxy=False) as kube:
        for each in DEFINITIONS:
            await bring_up_to_date(kube, each)


def main() -> None:
    """Exit code 1 when a CRD could not be applied."""
    logging.basicConfig(level="INFO", format="%(message)s")
    try:
        asyncio.run(_run())
    except (KubeError, TimeoutError) as error:
        sys.exit(f"the CRDs were not applied: {error!r}")


if __name__ == "__main__":
    main()
