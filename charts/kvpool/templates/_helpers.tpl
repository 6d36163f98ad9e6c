{{/* Names are fixed: one release per cluster. A second release fails because the objects already exist. */}}

{{- define "kvpool.labels" -}}
app.kubernetes.io/name: kvpool
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: kvpool
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "kvpool.selector" -}}
app.kubernetes.io/name: kvpool
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* registry/repository:tag, or registry/repository@sha256:... */}}
{{- define "kvpool.image" -}}
{{- $tag := .image.tag | default .root.Chart.AppVersion -}}
{{- with .root.Values.global.imageRegistry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ .image.repository }}{{ if hasPrefix "@" $tag }}{{ $tag }}{{ else }}:{{ $tag }}{{ end }}
{{- end }}

{{/* Pod spec fields shared by the operator and the webhook. */}}
{{- define "kvpool.pod" -}}
{{- with .root.Values.global.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
# service links of a Service named kvpool-... would define variables with the prefix of the settings
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  {{- /* OpenShift gives each namespace users of its own, and refuses others */}}
  {{- if not .root.Values.openshift.enabled }}
  runAsUser: 65532
  runAsGroup: 65532
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- with .values.priorityClassName | default (ternary .root.Values.priorityClass.name "" .root.Values.priorityClass.create) }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "kvpool.selector" . | nindent 6 }}
{{- end }}

{{- define "kvpool.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
readOnlyRootFilesystem: true
{{- end }}

{{/* Allowed metrics clients: the `from` part of an ingress rule. Probes from the node are always allowed. */}}
{{- define "kvpool.metricsFrom" -}}
{{- with .Values.networkPolicy.metricsFrom }}
from:
- namespaceSelector:
    matchLabels:
      {{- toYaml . | nindent 6 }}
{{- end }}
{{- end }}

{{/* Whether the ValidatingAdmissionPolicies are installed: the API has them from Kubernetes 1.30. */}}
{{- define "kvpool.admissionPolicies" -}}
{{- if and .Values.admissionPolicies.enabled (semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version) -}}
true
{{- end -}}
{{- end }}
