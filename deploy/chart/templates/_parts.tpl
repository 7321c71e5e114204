{{/* What parts share: labels, image, security, placement, budget, arguments. Ports and probes are in the template of each. */}}
{{/* Labels of a part: what selects it, and what Prometheus tells apart. Argument: the component. */}}
{{- define "atoll.labels" -}}
{app.kubernetes.io/name: atoll, app.kubernetes.io/component: {{ . }}}
{{- end }}

{{/* The reference of Atoll's image. */}}
{{- define "atoll.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{/* The reference of kube-scheduler's image, of the cluster's own version unless a tag is given. */}}
{{- define "atoll.schedulerImage" -}}
{{- $cluster := regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version -}}
{{- with .Values.scheduler.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $cluster }}{{ end }}
{{- end -}}
{{- end }}

{{/* What every pod of Atoll's has in common: nobody's user, no privilege. */}}
{{- define "atoll.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  {{- with .Values.podSecurity.runAsUser }}
  runAsUser: {{ int . }}
  {{- end }}
  {{- with .Values.podSecurity.runAsGroup }}
  runAsGroup: {{ int . }}
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "atoll.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: ["ALL"]}
{{- end }}

{{/* Where the replicas of a part may run. Argument: {part: its values, component, values: all}. A node has GPUs if it has
all labels of the agents' selector. */}}
{{- define "atoll.placement" -}}
{{- if ne .part.spread "none" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: {{ eq .part.spread "required" | ternary "DoNotSchedule" "ScheduleAnyway" }}
    labelSelector:
      matchLabels: {{ include "atoll.labels" .component }}
    # Each rollout is spread by itself.
    matchLabelKeys: ["pod-template-hash"]
{{- end }}
{{- if and (ne .values.avoidGpuNodes "none") .values.agent.nodeSelector }}
# Root on a node can use every token of its pods: on a GPU node it would be a tenant's.
affinity:
  nodeAffinity:
    {{- if eq .values.avoidGpuNodes "required" }}
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        {{- range $key, $value := .values.agent.nodeSelector }}
        - matchExpressions: [{key: {{ $key }}, operator: NotIn, values: [{{ quote $value }}]}]
        {{- end }}
    {{- else }}
    preferredDuringSchedulingIgnoredDuringExecution:
      {{- range $key, $value := .values.agent.nodeSelector }}
      - weight: 100
        preference:
          matchExpressions: [{key: {{ $key }}, operator: NotIn, values: [{{ quote $value }}]}]
      {{- end }}
    {{- end }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* One replica of a part may be away at a time. Argument: {part, component}; nothing where there is only one. */}}
{{- define "atoll.disruptionBudget" -}}
{{- if gt (int .part.replicas) 1 }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: atoll-{{ .component }}
  namespace: atoll-system
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{ include "atoll.labels" .component }}
{{- end }}
{{- end }}

{{/* A line of arguments of a part of Atoll's. Argument: {context, arguments, extra}. */}}
{{- define "atoll.arguments" -}}
{{- $arguments := .arguments -}}
{{- if ne .context.Values.logLevel "info" -}}
{{- $arguments = append $arguments (printf "--log-level=%s" .context.Values.logLevel) -}}
{{- end -}}
{{- concat $arguments .extra | toJson | replace "\",\"" "\", \"" -}}
{{- end }}

{{/* Who signs the webhook's certificate, for cert-manager. */}}
{{- define "atoll.issuer" -}}
{{- .Values.webhook.tls.issuerRef | default (dict "kind" "Issuer" "name" "atoll-webhook") | toJson -}}
{{- end }}
