"""What OpenShift's SecurityContextConstraints `restricted-v2` admit and fill in, as its documentation states it.

https://docs.redhat.com/en/documentation/openshift_container_platform/4.18/html/authentication_and_authorization/managing-pod-security-policies
No OpenShift is run: this is an emulation by manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

FIRST_USER, USERS = 1_000_660_000, 10_000  # annotation openshift.io/sa.scc.uid-range of a namespace: 1000660000/10000
ALLOWED_VOLUMES = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
)


def refusals(pod: Mapping[str, Any]) -> Iterator[str]:
    """Why a pod spec would not be admitted, in the order of its fields."""
    security = pod.get("securityContext") or {}
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield f"{name} is not allowed"
    if "fsGroup" in security and not _in_range(security["fsGroup"]):
        yield f"fsGroup {security['fsGroup']} is not in the namespace's range"
    if (security.get("seccompProfile") or {}).get("type") not in (None, "RuntimeDefault"):
        yield "seccomp profile is not runtime/default"
    for volume in pod.get("volumes") or ():
        yield from (f"volume type {kind} is not allowed" for kind in set(volume) - {"name"} - ALLOWED_VOLUMES)
    for container in (*(pod.get("initContainers") or ()), *pod["containers"]):
        own = {**security, **(container.get("securityContext") or {})}
        if "runAsUser" in own and not _in_range(own["runAsUser"]):
            yield f"runAsUser {own['runAsUser']} of {container['name']} is not in the namespace's range"
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            yield f"{container['name']} may escalate its privileges"
        if (own.get("capabilities") or {}).get("drop") != ["ALL"]:
            yield f"{container['name']} keeps capabilities"


def _in_range(number: int) -> bool:
    return FIRST_USER <= number < FIRST_USER + USERS
