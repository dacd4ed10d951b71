{{- define "baton.name" -}}
{{- if contains "baton" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-baton" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- /* The labels that select pods: of a list of the root and a component. */ -}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end }}

{{- define "baton.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "baton.claim" -}}
{{ .Values.model.existingClaim | default (printf "%s-models" (include "baton.name" .)) }}
{{- end }}

{{- define "baton.etcdArgs" -}}
- --etcd={{ join "," .Values.etcd.endpoints }}
- --cluster={{ .Values.etcd.cluster }}
{{- with .Values.etcd.user }}
- --etcd-user={{ . }}
{{- end }}
{{- end }}

{{- define "baton.etcdPassword" -}}
{{- if .Values.etcd.passwordSecret }}
- name: BATON_ETCD_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.etcd.passwordSecret }}
      key: password
{{- end }}
{{- end }}

{{- define "baton.container" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- /* What cannot work is said before anything is installed. */ -}}
{{- define "baton.check" -}}
{{- if not (has .Values.engine.kind (list "vllm" "sglang")) }}
{{- fail (printf "engine.kind is %q: give vllm or sglang" .Values.engine.kind) }}
{{- end }}
{{- if not (has .Values.engine.mode (list "pairs" "servers")) }}
{{- fail (printf "engine.mode is %q: give pairs or servers" .Values.engine.mode) }}
{{- end }}
{{- if and (gt (int .Values.frontDoor.replicas) 1) (not .Values.etcd.endpoints) }}
{{- fail "frontDoor.replicas above 1 needs etcd.endpoints: conductors that elect none would each know half of the cluster" }}
{{- end }}
{{- if not .Values.configSecret }}
{{- if not (regexMatch (printf "(?m)^\\s*block_tokens\\s*=\\s*%d\\s*(#.*)?$" (int .Values.engine.blockTokens)) .Values.config) }}
{{- fail (printf "config has no line block_tokens = %d: it has to be engine.blockTokens" (int .Values.engine.blockTokens)) }}
{{- end }}
{{- $drain := int .Values.frontDoor.drainSeconds }}
{{- $line := regexFind "(?m)^\\s*(service\\.)?drain(_us)?\\s*=.*$" .Values.config | default "drain_us = 30000000" | trim }}
{{- if not (regexMatch (printf "=\\s*(\"%ds\"|%d000000)\\s*(#.*)?$" $drain $drain) (replace "_" "" $line)) }}
{{- fail (printf "frontDoor.drainSeconds is %d, and the front door drains by %s: give the same, as drain = \"%ds\" in [service]" $drain $line $drain) }}
{{- end }}
{{- if and .Values.etcd.endpoints (not (contains "chain_seed" .Values.config)) }}
{{- fail "with etcd.endpoints the front doors need one service.chain_seed: put it into config, or the whole file into configSecret" }}
{{- end }}
{{- end }}
{{- if and .Values.autoscaling.enabled (eq .Values.engine.mode "servers") }}
{{- fail "autoscaling follows prefill and decode engines apart: it needs engine.mode pairs" }}
{{- end }}
{{- end }}

{{- define "baton.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
