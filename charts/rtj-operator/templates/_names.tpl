{{- define "rtj.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- /* Of objects outside namespaces: two releases of one name in two namespaces are two. */ -}}
{{- define "rtj.clusterName" -}}
{{- printf "%s.%s" (include "rtj.name" .) .Release.Namespace -}}
{{- end -}}
{{- define "rtj.labels" -}}
app.kubernetes.io/name: rtj-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}
{{- define "rtj.selector" -}}
app.kubernetes.io/name: rtj-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- define "rtj.image" -}}
{{- if .image.digest }}{{ .image.repository }}@{{ .image.digest }}
{{- else }}{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- /* Secrets that jobs may name, and that the operator may read. */ -}}
{{- define "rtj.secrets" -}}
{{- concat (list .Values.store.secretName) (default (list) .Values.store.allowedSecrets) | uniq | toJson -}}
{{- end -}}
{{- /* The Secret with the key that orders of fault drills are signed with. */ -}}
{{- define "rtj.faultKey" -}}
{{- .Values.faultInjection.existingSecret | default (printf "%s-fault-key" (include "rtj.name" .)) -}}
{{- end -}}
{{- /* Rules inside the namespaces of jobs. */ -}}
{{- define "rtj.jobRules" -}}
- apiGroups: [resumabletraining.io]
  resources: [resumabletrainingjobs]
  verbs: [get, list, watch, create, patch, delete]   # create: sandboxes of drills; delete: them, and by TTL
- apiGroups: [resumabletraining.io]
  resources: [resumedrills]
  verbs: [list, watch, create, delete]   # create, delete: by the schedules of jobs (spec.drill)
- apiGroups: [resumabletraining.io]
  resources: [resumabletrainingjobs/status, resumedrills/status]
  verbs: [patch]
- apiGroups: [resumabletraining.io]
  resources: [resumabletrainingjobs/finalizers, resumedrills/finalizers]
  verbs: [update]             # an owner may hold what is its own (admission plugin OwnerReferencesPermissionEnforcement)
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, patch, delete]   # create: only for server dry runs of a pod
- apiGroups: [""]
  resources: [events]
  verbs: [list]               # why a Job's pods are refused
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list]               # why a queue has not admitted a job (spec.scheduling.queue)
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- if .Values.store.readSecret }}
- apiGroups: [""]
  resources: [secrets]
  resourceNames: {{ include "rtj.secrets" . }}
  verbs: [get]
{{- end }}
{{- if .Values.faultInjection.enabled }}
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get]                # does the namespace of a job with fault orders agree to them
{{- end }}
{{- end -}}
{{- /* Rules for objects outside namespaces. */ -}}
{{- define "rtj.clusterRules" -}}
{{- if .Values.nodes.read }}
- apiGroups: [""]
  resources: [nodes]
  verbs: [get, list]
- apiGroups: [""]
  resources: [pods]
  verbs: [list]               # a node's free GPUs are those that no pod of any namespace has
{{- end }}
{{- end -}}
