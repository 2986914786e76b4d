"""A user who may read and write ModelServes of one namespace, and nothing of the cluster."""

from __future__ import annotations

TENANT = """
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: tenant, namespace: default}
rules: [{apiGroups: [serving.modelserve.dev], resources: [modelserves], verbs: [get, list, create, patch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: tenant, namespace: default}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: tenant}
subjects: [{kind: User, name: tenant}]
"""
