{{- define "modelserve.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- printf "%s-operator" .Release.Name | replace "." "-" | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s-operator" .Release.Name .Chart.Name | replace "." "-" | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "modelserve.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "modelserve.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "modelserve.selectorLabels" -}}
app.kubernetes.io/name: modelserve-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- /* Never managed-by: modelserve, which marks the children of ModelServes. */ -}}
{{- define "modelserve.labels" -}}
{{ include "modelserve.selectorLabels" . }}
app.kubernetes.io/part-of: modelserve
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* (image, Chart): repository@digest or repository:tag */ -}}
{{- define "modelserve.image" -}}
{{- $image := index . 0 -}}
{{- $chart := index . 1 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default $chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "modelserve.workerNamespaces" -}}
{{- concat .Values.watchNamespaces .Values.networkPolicy.workers.namespaces | uniq | toJson -}}
{{- end -}}

{{- /* The user of every pod; nothing where the platform assigns it: OpenShift refuses any that is not of its range. */ -}}
{{- define "modelserve.userId" -}}
{{- if kindIs "string" .Values.userId -}}
{{- if and (eq .Values.userId "auto") (not (.Capabilities.APIVersions.Has "security.openshift.io/v1")) -}}65532{{- end -}}
{{- else -}}
{{- .Values.userId | int64 -}}
{{- end -}}
{{- end -}}

{{- define "modelserve.podSecurity" -}}
runAsNonRoot: true
{{- with include "modelserve.userId" . }}
runAsUser: {{ . }}
runAsGroup: {{ . }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "modelserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "modelserve.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* A policy sees the port of the DNS pods, not that of their Service: on OpenShift it is 5353. */}}
{{- define "modelserve.dnsEgress" -}}
- ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]
- ports: [{protocol: UDP, port: 5353}, {protocol: TCP, port: 5353}]
  to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: openshift-dns
{{- end -}}

{{- /* What plans and revisions are made with: the operator's, and the webhook's, which must come to the same. */ -}}
{{- define "modelserve.planSettings" -}}
- name: MODELSERVE_WORKER_IMAGE
  value: {{ include "modelserve.image" (list .Values.worker.image .Chart) | quote }}
- name: MODELSERVE_WORKER_ARCHITECTURES
  value: {{ join "," .Values.worker.image.architectures | quote }}
- name: MODELSERVE_IMAGE_PULL_POLICY
  value: {{ .Values.worker.image.pullPolicy }}
- name: MODELSERVE_WORKER_POLICY
  value: {{ .Values.worker.policy }}
- name: MODELSERVE_ROLLING_BUDGET
  value: {{ .Values.worker.rollingBudget | quote }}
- name: MODELSERVE_ROLLING_FAILURES
  value: {{ .Values.worker.rollingFailures | quote }}
{{- with .Values.worker.rollingPatienceSeconds }}
- name: MODELSERVE_ROLLING_PATIENCE_SECONDS
  value: {{ . | quote }}
{{- end }}
{{- with .Values.worker.imagePullSecrets }}
- name: MODELSERVE_IMAGE_PULL_SECRETS
  value: {{ join "," . | quote }}
{{- end }}
{{- with .Values.allowed }}
- name: MODELSERVE_ALLOWED
  value: {{ toJson . | quote }}
{{- end }}
{{- with .Values.startupTaints }}
- name: MODELSERVE_STARTUP_TAINTS
  value: {{ join "," . | quote }}
{{- end }}
{{- with .Values.leavingTaints }}
- name: MODELSERVE_LEAVING_TAINTS
  value: {{ join "," . | quote }}
{{- end }}
- name: MODELSERVE_POD_USER_ID
  value: {{ include "modelserve.userId" . | quote }}
{{- end -}}

{{- define "modelserve.webhookName" -}}
{{- printf "%s-webhook" (include "modelserve.fullname" .) -}}
{{- end -}}

{{- define "modelserve.webhookSelectorLabels" -}}
app.kubernetes.io/name: modelserve-webhook
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "modelserve.webhookLabels" -}}
{{ include "modelserve.webhookSelectorLabels" . }}
app.kubernetes.io/part-of: modelserve
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* Of each watched namespace: revisions that run, and facts of models, read by names that are computed. */ -}}
{{- define "modelserve.webhookRules" -}}
- {apiGroups: [apps], resources: [controllerrevisions], verbs: [list]}
- {apiGroups: [""], resources: [configmaps, persistentvolumeclaims], verbs: [get]}
- {apiGroups: [serving.modelserve.dev], resources: [modelcaches], verbs: [get]}
{{- end -}}
