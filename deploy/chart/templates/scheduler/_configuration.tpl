{{/* The configuration of kube-scheduler, which the plain manifests have as files: scheduler/config.yaml. */}}
{{- define "atoll.schedulerConfiguration" -}}
{{- $part := .Values.scheduler -}}
{{- if $part.servesDefaultProfile -}}
# kube-scheduler with Atoll's extender, for clusters where this process is the only scheduler.
#
# One process has both profiles: two schedulers that do not know each other's pods would over-commit shared nodes. If the
# cluster's own scheduler must stay, use config-tainted-nodes.yaml instead.
{{- else -}}
# kube-scheduler with Atoll's extender beside a scheduler that cannot be replaced (managed control planes).
#
# GPU nodes must carry a taint that only GPU pods tolerate, so that no node is shared by the two. Replace config.yaml by
# this file in the kustomization. It differs only in having one profile.
{{- end }}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
  {{- if $part.servesDefaultProfile }}
  - schedulerName: default-scheduler
  {{- end }}
  - schedulerName: gpu-scheduler
    {{- with $part.gpuPercentageOfNodesToScore }}
    # A pod with GPUs gets the best of so many percent of the nodes, not of a sample that shrinks as the cluster grows.
    percentageOfNodesToScore: {{ . }}
    {{- end }}
# One replica leads at a time, and asks only the extender in its own pod.
leaderElection:
  leaderElect: true
  resourceLock: leases
  resourceNamespace: atoll-system
  resourceName: atoll-scheduler
  {{- with $part.leaderElection }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
# The default of 50 requests per second would bind about 57 pods per second.
clientConnection:
  qps: {{ $part.clientConnection.qps }}
  burst: {{ $part.clientConnection.burst }}
# Least time between attempts of a rejected pod; the shipped flags keep it in back-off until then.
podInitialBackoffSeconds: {{ $part.podInitialBackoffSeconds }}
podMaxBackoffSeconds: {{ $part.podMaxBackoffSeconds }}
{{- with $part.percentageOfNodesToScore }}
percentageOfNodesToScore: {{ . }}
{{- end }}
extenders:
  - urlPrefix: http://127.0.0.1:8888
    filterVerb: filter
    prioritizeVerb: prioritize
    bindVerb: bind
    preemptVerb: preempt
    # The extender's best node gets weight x 10 x 10 = {{ mul $part.weight 100 }} points, more than all default plugins together (1200), so
    # that placement always wins over spreading.
    weight: {{ $part.weight }}
    # Above the extender's own limit of 8 s for a bind, whose answer must not be lost.
    httpTimeout: 10s
    # Node names are sent, not Node objects.
    nodeCacheCapable: true
    # Without the extender a GPU pod waits; if it were ignorable, kube-scheduler would bind the pod without GPUs.
    ignorable: false
    # Only pods that count this resource reach the extender. kube-scheduler counts it too.
    managedResources:
      - name: gpu.scheduling/gpu
        ignoredByScheduler: false
{{- end }}
