{{- define "tetri.name" -}}
{{- .Release.Name | trunc 34 | trimSuffix "-" -}}
{{- end }}

{{- define "tetri.labels" -}}
app.kubernetes.io/name: vllm-tetri
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tetri.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.tag }}:{{ . }}{{ end }}
{{- end }}

{{- define "tetri.secret" -}}
{{ .Values.secret.existing | default (include "tetri.name" .) }}
{{- end }}

{{/* The options of one role: those of all instances, and its own in their place. */}}
{{- define "tetri.role" -}}
{{- $own := index .root.Values .role | default dict -}}
{{- $all := mergeOverwrite (deepCopy .root.Values.instances) (deepCopy $own) -}}
{{- $_ := set $all "args" (concat .root.Values.instances.args ($own.args | default list)) -}}
{{- $end := add $all.drainSeconds $all.shutdownTimeout 5 -}}
{{- $_ := set $all "grace" (kindIs "invalid" $all.terminationGracePeriodSeconds | ternary $end $all.terminationGracePeriodSeconds) -}}
{{- toYaml $all -}}
{{- end }}

{{/* What is left of a list of words that would contradict the chart. */}}
{{- define "tetri.refuse" -}}
{{- range $word := .args }}
{{- $option := first (splitList "=" (toString $word)) | replace "_" "-" }}
{{- if has $option $.options }}
{{- fail (printf "%s: the chart sets %s itself; leave it out%s" $.where $option ($.hint | default "")) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Fails with a sentence where values contradict each other and the schema cannot say so. */}}
{{- define "tetri.check" -}}
{{- $values := .Values }}
{{- $count := dict }}
{{- range $role := list "prefill" "decode" "both" }}
{{- $scale := index $values.autoscaling $role }}
{{- $replicas := int (index $values $role).replicas }}
{{- if and $values.autoscaling.enabled $replicas }}
{{- if gt (int $scale.min) (int $scale.max) }}
{{- fail (printf "autoscaling.%s: min %v is above max %v" $role $scale.min $scale.max) }}
{{- end }}
{{- end }}
{{- $_ := set $count $role $replicas }}
{{- if $replicas }}
{{- $one := include "tetri.role" (dict "root" $ "role" $role) | fromYaml }}
{{- $least := add $one.drainSeconds $one.shutdownTimeout 5 }}
{{- if lt (int $one.grace) (int $least) }}
{{- fail (printf "%s: terminationGracePeriodSeconds %v is too short, requests would be cut off: give at least drainSeconds + shutdownTimeout + 5 = %v, or leave it out" $role $one.grace $least) }}
{{- end }}
{{- if and (eq (toString $one.rollingUpdate.maxSurge) "0") (eq (toString $one.rollingUpdate.maxUnavailable) "0") }}
{{- fail (printf "%s: rollingUpdate.maxSurge and maxUnavailable are both 0, so no pod could ever be replaced" $role) }}
{{- end }}
{{- $own := list "--role" "--host" "--port" "--tetri-instance" "--tetri-control" "--tetri-host" "--tetri-url" "--tetri-kv-port" "--tetri-secret-file" "--shutdown-timeout" "--api-key" }}
{{- include "tetri.refuse" (dict "args" $one.args "where" (printf "%s.args" $role) "options" $own) }}
{{- include "tetri.refuse" (dict "args" $one.args "where" (printf "%s.args" $role) "options" (list "--data-parallel-size" "-dp") "hint" ", and give replicas instead: ranks of one server are several instances") }}
{{- end }}
{{- end }}
{{- if not (add $count.prefill $count.decode $count.both) }}
{{- fail "no instance: give replicas to prefill and decode, or to both" }}
{{- end }}
{{- if and (eq .Values.mode "split") (not $count.both) (not (and $count.prefill $count.decode)) }}
{{- $missing := ternary "decode" "prefill" (gt (int $count.prefill) 0) }}
{{- fail (printf "mode split needs a %s instance: give %s.replicas or both.replicas at least 1, or another mode" $missing $missing) }}
{{- end }}
{{- if and .Values.autoscaling.enabled (not .Values.autoscaling.prometheusAddress) }}
{{- fail "autoscaling.enabled needs autoscaling.prometheusAddress, the URL of the Prometheus that scrapes the routers" }}
{{- end }}
{{- $own := list "--host" "--port" "--control" "--secret-file" "--shutdown-timeout" "--mode" "--flip" "--flip-lease" "--api-key" "--api-key-file" }}
{{- include "tetri.refuse" (dict "args" .Values.router.args "where" "router.args" "options" $own) }}
{{- include "tetri.refuse" (dict "args" .Values.router.args "where" "router.args" "options" (list "--ssl-certfile" "--ssl-keyfile") "hint" ", and end TLS in front of the routers: probes and drains speak HTTP") }}
{{- end }}

{{/* How Prometheus finds load: every router shows all instances, which count once. */}}
{{- define "tetri.query.queuedTokens" -}}
sum(max by (instance) (tetri_instance_queued_prefill_tokens{ {{- . -}} }))
{{- end }}
{{- define "tetri.query.kvUse" -}}
sum(max by (instance) (tetri_instance_blocks_used{ {{- . -}} } / tetri_instance_blocks_total))
{{- end }}
