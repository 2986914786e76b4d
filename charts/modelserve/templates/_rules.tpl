{{- /* The same rules as modelserve_operator.cluster.kinds; a test holds them equal. */ -}}
{{- define "modelserve.namespacedRules" -}}
- {apiGroups: [serving.modelserve.dev], resources: [modelserves], verbs: [get, list, watch]}
- {apiGroups: [serving.modelserve.dev], resources: [modelserves/status], verbs: [patch]}
# blockOwnerDeletion is only admitted to those who may update the owner's finalizers; none is ever set.
- {apiGroups: [serving.modelserve.dev], resources: [modelserves/finalizers], verbs: [update]}
# Patched are finalizers: workers finish what they answer with an adapter before it goes.
- {apiGroups: [serving.modelserve.dev], resources: [modeladapters], verbs: [get, list, watch, patch]}
- {apiGroups: [serving.modelserve.dev], resources: [modeladapters/status], verbs: [patch]}
# Which namespaces' ModelAdapters may refer to ModelServes of this one.
- {apiGroups: [gateway.networking.k8s.io], resources: [referencegrants], verbs: [list, watch]}
- {apiGroups: [apps], resources: [deployments, controllerrevisions], verbs: [get, list, watch, create, patch, delete]}
- {apiGroups: [batch], resources: [jobs], verbs: [get, list, watch, create, patch, delete]}
- {apiGroups: [""], resources: [configmaps], verbs: [get, list, watch, create, patch, delete]}
# An owner reference is only admitted to those who may delete the object: children that an orphaning delete left.
- {apiGroups: [""], resources: [services], verbs: [get, list, watch, create, patch, delete]}
- {apiGroups: [policy], resources: [poddisruptionbudgets], verbs: [get, list, watch, create, patch, delete]}
# Of spec.capacityBuffer.
- {apiGroups: [""], resources: [podtemplates], verbs: [get, list, watch, create, patch, delete]}
- {apiGroups: [autoscaling.x-k8s.io], resources: [capacitybuffers], verbs: [get, list, watch, create, patch, delete]}
# Of plans whose GPUs are asked for by claims (dynamic resource allocation).
- {apiGroups: [resource.k8s.io], resources: [resourceclaimtemplates], verbs: [get, list, watch, create, patch, delete]}
# Whether a pod that waits for devices waits for those of a worker that a rollout would stop.
- {apiGroups: [resource.k8s.io], resources: [resourceclaims], verbs: [get]}
# Of spec.gateway.
- {apiGroups: [gateway.networking.k8s.io], resources: [httproutes], verbs: [get, list, watch, create, patch, delete]}
- {apiGroups: [inference.networking.k8s.io], resources: [inferencepools], verbs: [get, list, watch, create, patch, delete]}
# Of adapters whose new version answers a part of the requests.
- {apiGroups: [inference.networking.x-k8s.io], resources: [inferencemodelrewrites], verbs: [get, list, watch, create, patch, delete]}
# Patched are annotations: which worker goes first, and which of them autoscalers spare.
- {apiGroups: [""], resources: [pods], verbs: [get, list, watch, patch]}
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
- {apiGroups: [""], resources: [persistentvolumeclaims], verbs: [get]}
- {apiGroups: [""], resources: [events], verbs: [list, create]}
{{- if eq .Values.workerAccess "api-proxy" }}
- {apiGroups: [""], resources: [pods/proxy], verbs: [get, update]}
{{- end }}
{{- if .Values.adapters.secrets }}
# Tokens that ModelAdapters name for private repositories.
- {apiGroups: [""], resources: [secrets], verbs: [get]}
{{- end }}
{{- if .Values.modelCaches.enabled }}
# Patched are finalizers: the bytes of a cache go before it does.
- {apiGroups: [serving.modelserve.dev], resources: [modelcaches], verbs: [get, list, watch, patch]}
- {apiGroups: [serving.modelserve.dev], resources: [modelcaches/status], verbs: [patch]}
- {apiGroups: [serving.modelserve.dev], resources: [modelcaches/finalizers], verbs: [update]}
# Of storage.volume.
- {apiGroups: [""], resources: [persistentvolumeclaims], verbs: [create, patch, delete]}
{{- end }}
{{- end -}}
