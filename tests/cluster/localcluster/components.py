"""Configuration files and command lines of the cluster's programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from localcluster.certificates import CertificateAuthority
from localcluster.node_profile import NodeProfile
from localcluster.settings import (
    ADMIN_USER,
    API_PORT,
    IMAGE_RUNTIME,
    NODE_NAME,
    OPERATOR_USER,
    PAUSE_IMAGE,
    RELEASE_NAMESPACES,
    Layout,
)

_ETCD_URL = "http://127.0.0.1:2379"
_FRONT_PROXY = "front-proxy"
_CLIENTS = {  # certificate: (user, group)
    "admin": (ADMIN_USER, "system:masters"),
    "kubelet": (f"system:node:{NODE_NAME}", "system:nodes"),
    "controller-manager": ("system:kube-controller-manager", None),
    "scheduler": ("system:kube-scheduler", None),
    "proxy": ("system:kube-proxy", None),
    "operator": (OPERATOR_USER, None),
}


def write_certificates(layout: Layout) -> None:
    authority = CertificateAuthority.create(layout.certificates)
    authority.issue_key_pair("service-accounts")
    service = [f"kubernetes{suffix}" for suffix in ("", ".default", ".default.svc", ".default.svc.cluster.local")]
    authority.issue_server("apiserver", [layout.node_address, layout.kubernetes_service_address, "127.0.0.1", *service])
    # What other API servers that this one forwards to know it by; its own clients' authority must not vouch for users.
    front_proxy = CertificateAuthority.create(layout.certificates / "front-proxy")
    front_proxy.issue_client("proxy-client", user=_FRONT_PROXY)
    layout.config.mkdir(parents=True, exist_ok=True)
    special = {"admin": layout.admin_kubeconfig, "operator": layout.operator_kubeconfig}
    for client, (user, group) in _CLIENTS.items():
        authority.issue_client(client, user=user, group=group)
        path = special.get(client, layout.config / f"{client}.kubeconfig")
        authority.write_kubeconfig(path, client=client, server=layout.api_server_url)


def write_configuration(
    layout: Layout,
    *,
    cni_folder: Path,
    runtime_spec: dict[str, Any],
    plain_spec: dict[str, Any],
    snapshotter: str,
    profile: NodeProfile,
) -> None:
    folder = layout.config
    (folder / "cni").mkdir(parents=True, exist_ok=True)
    (folder / "runtime-spec.json").write_text(json.dumps(runtime_spec))
    (folder / "plain-runtime-spec.json").write_text(json.dumps(plain_spec))
    (folder / "containerd.toml").write_text(_containerd(layout, cni_folder, snapshotter))
    (folder / "cni" / "10-modelserve.conflist").write_text(json.dumps(_cni(layout, profile)))
    for name, document in (("kubelet", _kubelet(layout, profile)), ("proxy", _proxy(layout)), ("audit", AUDIT_POLICY)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(document))


def _containerd(layout: Layout, cni_folder: Path, snapshotter: str) -> str:
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "{layout.path}/containerd"
state = "/run/containerd/state"
[grpc]
address = "{layout.containerd_socket}"
[{cri}]
sandbox_image = "{PAUSE_IMAGE}"
# Lowering a score needs CAP_SYS_RESOURCE, which sandboxes withhold; without this every pod fails there.
restrict_oom_score_adj = true
[{cri}.cni]
bin_dir = "{cni_folder}"
conf_dir = "{layout.config}/cni"
[{cri}.containerd]
snapshotter = "{snapshotter}"
[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "{layout.config}/runtime-spec.json"
# For images that bring all they need: nothing is lent.
[{cri}.containerd.runtimes.{IMAGE_RUNTIME}]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "{layout.config}/plain-runtime-spec.json"
"""


def _cni(layout: Layout, profile: NodeProfile) -> dict[str, Any]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": profile.services,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": f"{layout.path}/cni",
            "ranges": [[{"subnet": layout.pod_range}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    plugins = [bridge, portmap] if profile.services else [bridge]
    return {"cniVersion": "1.0.0", "name": "modelserve", "plugins": plugins}


def _kubelet(layout: Layout, profile: NodeProfile) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "x509": {"clientCAFile": f"{layout.certificates}/ca.crt"},
            "webhook": {"enabled": True},
            "anonymous": {"enabled": False},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.cgroup}",
        "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
        "clusterDNS": ["10.96.0.10"],
        "clusterDomain": "cluster.local",
        "failCgroupV1": False,
        "failSwapOn": False,
        "imageGCHighThresholdPercent": 100,
        "enforceNodeAllocatable": ["pods" if profile.fixed_memory else "none"],
        "evictionHard": {
            "memory.available": "100Mi" if profile.fixed_memory else "0%",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
        "resolvConf": "",
        "volumePluginDir": f"{layout.path}/kubelet-plugins",
        "staticPodPath": "",
        "nodeStatusUpdateFrequency": "10s",
        # The tests end containers again and again: the third end of one must not cost 20 s, nor the fourth 40.
        "featureGates": {"KubeletCrashLoopBackOffMax": True, "ImageVolume": True},
        "crashLoopBackOff": {"maxContainerRestartPeriod": "3s"},
        "logging": {"verbosity": 1},
    }


def _proxy(layout: Layout) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "iptables": {"syncPeriod": "5s"},  # rules that could not be written are tried again after this, not 30 s
        "clusterCIDR": layout.pod_range,
        "hostnameOverride": NODE_NAME,
        "clientConnection": {"kubeconfig": f"{layout.config}/proxy.kubeconfig"},
        # The table of connections is the host's: its size is not ours to change.
        "conntrack": {"maxPerCore": 0, "min": 0},
    }


AUDIT_POLICY: dict[str, Any] = {
    # Writes are recorded by user, kind and name, without bodies; of operators all that they ask for. Other leases are
    # heartbeats and would drown the rest.
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Metadata", "users": [OPERATOR_USER]},
        {"level": "Metadata", "userGroups": [f"system:serviceaccounts:{name}" for name in RELEASE_NAMESPACES]},
        {"level": "None", "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}]},
        {"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]},
        {"level": "None"},
    ],
}


def _aggregation(front_proxy: Path) -> list[str]:
    """Flags with which requests for an APIService go to it, in the name of who asks."""
    return [
        f"--requestheader-client-ca-file={front_proxy}/ca.crt",
        f"--requestheader-allowed-names={_FRONT_PROXY}",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={front_proxy}/proxy-client.crt",
        f"--proxy-client-key-file={front_proxy}/proxy-client.key",
    ]


def commands(layout: Layout, programs: dict[str, Path]) -> dict[str, list[str]]:
    """Command line of each program, in the order in which they are started."""
    certificates, config = layout.certificates, layout.config
    kubeconfigs = {
        name: f"--kubeconfig={config}/{name}.kubeconfig" for name in ("controller-manager", "scheduler", "kubelet")
    }
    return {
        "containerd": ["containerd", f"--config={config}/containerd.toml"],
        "etcd": [
            str(programs["etcd"]),
            f"--data-dir={layout.path}/etcd",
            f"--listen-client-urls={_ETCD_URL}",
            f"--advertise-client-urls={_ETCD_URL}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ],
        "kube-apiserver": [
            str(programs["kube-apiserver"]),
            f"--etcd-servers={_ETCD_URL}",
            f"--advertise-address={layout.node_address}",
            f"--secure-port={API_PORT}",
            f"--cert-dir={certificates}",
            f"--tls-cert-file={certificates}/apiserver.crt",
            f"--tls-private-key-file={certificates}/apiserver.key",
            f"--client-ca-file={certificates}/ca.crt",
            f"--kubelet-client-certificate={certificates}/admin.crt",
            f"--kubelet-client-key={certificates}/admin.key",
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-cluster-ip-range={layout.service_range}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={certificates}/service-accounts.pub",
            f"--service-account-signing-key-file={certificates}/service-accounts.key",
            "--authorization-mode=Node,RBAC",
            "--feature-gates=ImageVolume=true",  # on by itself in newer releases
            *_aggregation(certificates / "front-proxy"),
            # The second is what stricter distributions add: it admits blockOwnerDeletion only to those who may set it.
            "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
            f"--audit-policy-file={config}/audit.yaml",
            f"--audit-log-path={layout.audit_log}",
            "--event-ttl=1h",
        ],
        "kube-controller-manager": [
            str(programs["kube-controller-manager"]),
            kubeconfigs["controller-manager"],
            "--use-service-account-credentials",
            "--leader-elect=false",
            "--horizontal-pod-autoscaler-sync-period=2s",
            f"--root-ca-file={certificates}/ca.crt",
            f"--service-account-private-key-file={certificates}/service-accounts.key",
        ],
        "kube-scheduler": [str(programs["kube-scheduler"]), kubeconfigs["scheduler"], "--leader-elect=false"],
        "kubelet": [
            str(programs["kubelet"]),
            kubeconfigs["kubelet"],
            f"--config={config}/kubelet.yaml",
            f"--root-dir={layout.path}/kubelet",
            f"--cert-dir={layout.path}/kubelet-pki",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={layout.node_address}",
        ],
        "kube-proxy": [str(programs["kube-proxy"]), f"--config={config}/proxy.yaml"],
    }
