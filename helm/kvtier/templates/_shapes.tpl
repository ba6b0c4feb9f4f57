{{/*
The node groups, as a JSON array of shapes: what is given for all, overlaid with what a group says. One unnamed shape
when there are no groups.
*/}}
{{- define "kvtier.shapes" -}}
{{- $keys := list "policy" "nodeSelector" "affinity" "tolerations" "coldStore" "hugePages" "gpu" "resources" -}}
{{- $common := dict -}}
{{- range $keys }}{{- $_ := set $common . (index $.Values .) -}}{{- end -}}
{{- $shapes := list -}}
{{- range .Values.nodeGroups -}}
{{- $shapes = append $shapes (mergeOverwrite (deepCopy $common) (deepCopy .)) -}}
{{- end -}}
{{- if not $shapes -}}
{{- $shapes = list (set $common "name" "") -}}
{{- end -}}
{{- toJson $shapes -}}
{{- end -}}

{{/* The name of a shape's DaemonSet and ConfigMap. Of (root, shape). */}}
{{- define "kvtier.shapeName" -}}
{{- $name := include "kvtier.fullname" .root -}}
{{- if .shape.name }}{{ printf "%s-%s" $name .shape.name }}{{ else }}{{ $name }}{{ end -}}
{{- end -}}

{{- define "kvtier.shapeSelector" -}}
{{ include "kvtier.selectorLabels" .root }}
kvtier.io/node-group: {{ default "all" .shape.name }}
{{- end -}}

{{/* Bytes of a size as people write it, the same grammar as appliance/config/units.py. */}}
{{- define "kvtier.bytes" -}}
{{- $text := kindIs "string" . | ternary . (. | int64 | toString) | lower | nospace -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" $text -}}
{{- $unit := trimPrefix $number $text | trimSuffix "b" -}}
{{- $factors := dict "" 1 "k" 1000 "m" 1000000 "g" 1000000000 "t" 1000000000000 "p" 1000000000000000
    "ki" 1024 "mi" 1048576 "gi" 1073741824 "ti" 1099511627776 "pi" 1125899906842624 -}}
{{- if not (hasKey $factors $unit) }}{{ fail (printf "%q is not a size; write it like 512MiB, 64GiB or 3TiB (not as a share: the pod's memory limit is computed from it)" .) }}{{ end -}}
{{- if contains "." $number }}{{ mulf $number (index $factors $unit) | int64 }}{{ else }}{{ mul $number (index $factors $unit) }}{{ end -}}
{{- end -}}

{{/*
Host memory that a memory tier of (capacity, extent) takes: whole extents, each with its slot headers (128 bytes for 16 KiB) in whole pages of
2 MiB (extent_file_bytes in proto/kvtier/v1/shm.py; a test compares).
*/}}
{{- define "kvtier.tierBytes" -}}
{{- $capacity := include "kvtier.bytes" (default "1GiB" .capacity) | int64 -}}
{{- $extent := include "kvtier.bytes" (default "64MiB" .extent) | int64 -}}
{{- $headers := mul (div $extent 16384) 128 -}}
{{- $pages := div (add $headers 2097151) 2097152 -}}
{{- mul (div $capacity $extent) (add $extent (mul $pages 2097152)) -}}
{{- end -}}

{{/* Host memory of all tiers of a shape: dram, hbm where it is host memory, and further memories by any name. */}}
{{- define "kvtier.hostBytes" -}}
{{- $tiers := default dict .policy.tiers -}}
{{- $dram := default dict $tiers.dram -}}
{{- $total := include "kvtier.tierBytes" $dram | int64 -}}
{{- range $tier := omit $tiers "dram" "nvme" -}}
{{- with $tier -}}
{{- if ne (default "host" .backend) "cuda" -}}
{{- $total = add $total (include "kvtier.tierBytes" (dict "capacity" .capacity "extent" $dram.extent) | int64) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $total -}}
{{- end -}}

{{/* The address of a shape's object store, or nothing. */}}
{{- define "kvtier.objectUrl" -}}
{{- dig "object" "url" "" .policy -}}
{{- end -}}

{{/* Whether a shape stores anything outside its memory, as text: empty for no. */}}
{{- define "kvtier.isStored" -}}
{{- if or (include "kvtier.hasCold" .) (include "kvtier.objectUrl" .) }}yes{{- end -}}
{{- end -}}

{{/* Whether a shape has a cold store, as text: empty for no. */}}
{{- define "kvtier.hasCold" -}}
{{- with .policy.tiers }}{{- if .nvme }}yes{{- end }}{{- end -}}
{{- end -}}
