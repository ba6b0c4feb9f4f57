{{/*
The policy file of a shape: what the values say, and what only the chart knows: addresses, paths of mounts, huge pages.
Of (root, shape).
*/}}
{{- define "kvtier.policy" -}}
{{- $values := .root.Values -}}
{{- $policy := deepCopy .shape.policy -}}
{{- $listen := list (include "kvtier.target" .root) -}}
{{- if $values.grpc.enabled }}{{- $listen = append $listen (printf "%s:%d" $values.listenHost (int $values.grpc.port)) }}{{- end -}}
{{- $_ := set $policy "listen" $listen -}}

{{- if $values.fleet.enabled -}}
{{- $peers := default dict $policy.peers -}}
{{- $hosts := include "kvtier.hostsName" .root -}}
{{- with $values.fleet.directory -}}
{{- if .url -}}
{{- $directory := dict "url" .url "index" .index -}}
{{- if .secretName }}{{- $_ := set $directory "credentials" "/etc/kvtier-directory" }}{{- end -}}
{{- $_ := set $peers "directory" $directory -}}
{{- end -}}
{{- if not .index }}{{- $_ := set $peers "hosts" (list (printf "%s:%d" $hosts (int $values.grpc.port))) }}{{- end -}}
{{- end -}}
{{- $_ := set $peers "data_port" (int $values.fleet.dataPort) -}}
{{- if $values.tls.secretName }}{{- $_ := set $peers "certificate_name" $hosts }}{{- end -}}
{{- $_ := set $policy "peers" $peers -}}
{{- end -}}

{{- $tiers := default dict $policy.tiers -}}
{{- $dram := default dict $tiers.dram -}}
{{- $_ := set $dram "hugepages" (ternary "on" "off" .shape.hugePages.enabled) -}}
{{- $_ := set $tiers "dram" $dram -}}
{{- if $tiers.nvme }}{{- $_ := set $tiers.nvme "path" "/var/lib/kvtier/cold" }}{{- end -}}
{{- $_ := set $policy "tiers" $tiers -}}

{{- $observe := default dict $policy.observe -}}
{{- $_ := set $observe "http" (printf "%s:%d" $values.listenHost (int $values.http.port)) -}}
{{- /* With tenants only named readers are admitted; here the NetworkPolicy limits access to the port. */ -}}
{{- if and $policy.tenants $values.networkPolicy.enabled (not $observe.readers) }}{{- $_ := set $observe "readers" "anyone" }}{{- end -}}
{{- $_ := set $policy "observe" $observe -}}

{{- $access := default dict $policy.access -}}
{{- if $values.tls.secretName -}}
{{- $tls := dict "certificate" "/etc/kvtier-tls/tls.crt" "key" "/etc/kvtier-tls/tls.key" -}}
{{- /* A release of before this value has none: certificates were always asked for. */ -}}
{{- if ne (toString $values.tls.clientCertificates) "false" }}{{- $_ := set $tls "client_ca" "/etc/kvtier-tls/ca.crt" }}{{- end -}}
{{- $_ := set $access "tls" $tls -}}
{{- end -}}
{{- if $values.tokens.secretName -}}
{{- $_ := set $access "tokens" (printf "/etc/kvtier-tokens/%s" $values.tokens.key) -}}
{{- end -}}
{{- /* The kubelet gives a Secret's files to root and to the pod's group, for which it adds the right to read (0440). */ -}}
{{- if and $values.masterKey.secretName (include "kvtier.isStored" .shape) -}}
{{- $_ := set $policy "encryption" (dict "master_key" (printf "/etc/kvtier-master-key/%s" $values.masterKey.key)) -}}
{{- end -}}
{{- /* Runtimes' containers often run as root, and root is an administrator where none is named: name ourselves. */ -}}
{{- $own := printf "uid:%d" (int64 $values.security.runAsUser) -}}
{{- $_ := set $access "admin" (prepend (default list $access.admin) $own | uniq) -}}
{{- $_ := set $policy "access" $access -}}
{{- toYaml $policy -}}
{{- end -}}

{{/*
A digest of what in a policy needs another life of the daemon. It is an annotation of the pods, so that `helm upgrade`
replaces them for such a change and leaves them alone, to reload the file, for any other. Of (root, shape).
*/}}
{{- define "kvtier.restartDigest" -}}
{{- $policy := include "kvtier.policy" . | fromYaml -}}
{{- range (.root.Files.Get "files/live.yaml" | fromYaml).live -}}
{{- $path := splitList "." . -}}
{{- $nodes := list $policy -}}
{{- range $key := initial $path -}}
{{- $below := list -}}
{{- range $node := $nodes -}}
{{- range $name, $one := $node }}{{- if and (kindIs "map" $one) (has $key (list "*" $name)) }}{{- $below = append $below $one }}{{- end }}{{- end -}}
{{- end -}}
{{- $nodes = $below -}}
{{- end -}}
{{- range $node := $nodes }}{{- $_ := unset $node (last $path) }}{{- end -}}
{{- end -}}
{{- range $name, $section := deepCopy $policy }}{{- if and (kindIs "map" $section) (not $section) }}{{- $_ := unset $policy $name }}{{- end }}{{- end -}}
{{- toJson $policy | sha256sum -}}
{{- end -}}
