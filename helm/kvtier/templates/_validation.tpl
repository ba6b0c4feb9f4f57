{{/*
Combinations that no schema can refuse. Each sentence says what to write instead. Of the root; all problems at once.
*/}}
{{- define "kvtier.validate" -}}
{{- $problems := list -}}
{{- $shapes := include "kvtier.shapes" . | fromJsonArray -}}
{{- range $shapes -}}
{{- $where := ternary (printf "nodeGroups %s: " .name) "" (ne .name "") -}}
{{- range include "kvtier.validateShape" (dict "root" $ "shape" .) | fromJsonArray -}}
{{- $problems = append $problems (printf "%s%s" $where .) -}}
{{- end -}}
{{- end -}}
{{- range include "kvtier.validateRelease" (dict "root" $ "shapes" $shapes) | fromJsonArray -}}
{{- $problems = append $problems . -}}
{{- end -}}
{{- if $problems -}}
{{- fail (printf "\n\nThese values cannot be installed:\n  - %s\n" (uniq $problems | join "\n  - ")) -}}
{{- end -}}
{{- end -}}

{{- define "kvtier.validateShape" -}}
{{- $values := .root.Values -}}
{{- $problems := list -}}
{{- with .shape -}}
{{- $policy := .policy -}}
{{- $tiers := default dict $policy.tiers -}}
{{- $dram := default dict $tiers.dram -}}
{{- $nvme := default dict $tiers.nvme -}}
{{- $ways := compact (list .coldStore.hostPath.path .coldStore.volumeClaim.storageClassName .coldStore.existingClaim) -}}
{{- if not (or .nodeSelector (dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" "" .affinity)) }}{{- $problems = append $problems "no nodes are chosen, and the daemon takes memory of every node that it runs on: set nodeSelector. Nodes with NVIDIA GPUs: --set-string 'nodeSelector.nvidia\\.com/gpu\\.present=true'; every Linux node: --set-string 'nodeSelector.kubernetes\\.io/os=linux'" }}{{- end -}}
{{- if hasKey $policy "listen" }}{{- $problems = append $problems "policy.listen is the chart's: set socket.hostPath, and grpc.enabled for TCP" }}{{- end -}}
{{- if hasKey (default dict $policy.observe) "http" }}{{- $problems = append $problems "policy.observe.http is the chart's: set http.port, and networkPolicy.metricsFrom for its readers" }}{{- end -}}
{{- if dig "access" "tls" "" $policy }}{{- $problems = append $problems "policy.access.tls is the chart's: put tls.crt, tls.key and ca.crt into a Secret and set tls.secretName" }}{{- end -}}
{{- if dig "access" "tokens" "" $policy }}{{- $problems = append $problems "policy.access.tokens is the chart's: put the file into a Secret and set tokens.secretName" }}{{- end -}}
{{- if $policy.encryption }}{{- $problems = append $problems "policy.encryption is the chart's: put the file of master keys into a Secret and set masterKey.secretName" }}{{- end -}}
{{- if omit (default dict $policy.peers) "send_limit" }}{{- $problems = append $problems "policy.peers is the chart's, but for send_limit: set fleet.enabled, fleet.dataPort and fleet.directory" }}{{- end -}}
{{- if hasKey $dram "hugepages" }}{{- $problems = append $problems "policy.tiers.dram.hugepages is the chart's, because pages must be requested from Kubernetes, too: set hugePages.enabled" }}{{- end -}}
{{- if hasKey $nvme "path" }}{{- $problems = append $problems "policy.tiers.nvme.path is the chart's: say under coldStore where on the node it is" }}{{- end -}}
{{- if and $nvme (not $ways) }}{{- $problems = append $problems "policy.tiers.nvme has no place: set coldStore.hostPath.path (a directory on the device), coldStore.volumeClaim or coldStore.existingClaim" }}{{- end -}}
{{- if and $ways (not $nvme) }}{{- $problems = append $problems "coldStore is given and not used: set policy.tiers.nvme.capacity" }}{{- end -}}
{{- if gt (len $ways) 1 }}{{- $problems = append $problems "coldStore is given in several ways: keep one of hostPath, volumeClaim, existingClaim" }}{{- end -}}
{{- if and .coldStore.volumeClaim.storageClassName (not .coldStore.volumeClaim.size) }}{{- $problems = append $problems "coldStore.volumeClaim has no size: set coldStore.volumeClaim.size, a tenth more than policy.tiers.nvme.capacity" }}{{- end -}}
{{- if and .coldStore.hostPath.path (eq .coldStore.hostPath.path $values.socket.hostPath) }}{{- $problems = append $problems "coldStore.hostPath.path and socket.hostPath are one folder, which runtimes mount: give each its own" }}{{- end -}}
{{- $cuda := eq (dig "hbm" "backend" "host" $tiers) "cuda" -}}
{{- if and $cuda (ne .gpu.sharing "ipc") }}{{- $problems = append $problems "policy.tiers.hbm.backend is cuda and the pod sees no GPU: set gpu.sharing to ipc (it gives the pod hostIPC)" }}{{- end -}}
{{- if and (eq .gpu.sharing "ipc") (not $cuda) }}{{- $problems = append $problems "gpu.sharing is ipc and nothing uses the GPU: set policy.tiers.hbm.backend to cuda, or gpu.sharing to none" }}{{- end -}}
{{- if $dram.lock }}{{- $problems = append $problems "policy.tiers.dram.lock needs a memlock limit that Kubernetes cannot give to a process that is not root: leave it false (nodes without swap need no lock) or set hugePages.enabled (they are never swapped)" }}{{- end -}}
{{- $bound := false -}}
{{- range $tier := omit $tiers "hbm" "nvme" }}{{- if (default dict $tier).numa_nodes }}{{- $bound = true }}{{- end }}{{- end -}}
{{- if and $bound (eq (dig "type" "RuntimeDefault" $values.security.seccompProfile) "RuntimeDefault") }}{{- $problems = append $problems "numa_nodes of a tier need the system call mbind, which the RuntimeDefault profile refuses: set security.seccompProfile to a Localhost profile that adds it, or to {type: Unconfined}" }}{{- end -}}
{{- if and (eq (dig "observe" "traces" "off" $policy | toString) "otlp") $values.networkPolicy.enabled (not $values.networkPolicy.egress) }}{{- $problems = append $problems "policy.observe.traces is otlp and the NetworkPolicy lets nothing out: add the collector to networkPolicy.egress" }}{{- end -}}
{{- end -}}
{{- toJson $problems -}}
{{- end -}}

{{- define "kvtier.validateRelease" -}}
{{- $problems := list -}}
{{- $values := .root.Values -}}
{{- $names := list -}}
{{- $selectors := list -}}
{{- $insecure := true -}}
{{- $isStored := "" -}}
{{- $urls := list -}}
{{- range .shapes -}}
{{- $names = append $names .name -}}
{{- $selectors = append $selectors (printf "%s %s" (toJson .nodeSelector) (toJson .affinity)) -}}
{{- if not (dig "access" "insecure" false .policy) }}{{- $insecure = false }}{{- end -}}
{{- $isStored = default $isStored (include "kvtier.isStored" .) -}}
{{- $urls = compact (append $urls (include "kvtier.objectUrl" .)) | uniq -}}
{{- end -}}
{{- if ne (len (uniq $names)) (len $names) }}{{- $problems = append $problems "two nodeGroups have one name: give each its own" }}{{- end -}}
{{- if ne (len (uniq $selectors)) (len $selectors) }}{{- $problems = append $problems "two nodeGroups choose the same nodes, and a node has room for one daemon: give each its own nodeSelector" }}{{- end -}}
{{- if and $values.grpc.enabled (not $values.tls.secretName) (not $insecure) }}{{- $problems = append $problems "grpc.enabled needs certificates: set tls.secretName to a Secret with tls.crt, tls.key and ca.crt, or spell out policy.access.insecure: true" }}{{- end -}}
{{- if and $values.tls.secretName (not $values.grpc.enabled) }}{{- $problems = append $problems "tls.secretName is set and nothing listens on TCP: set grpc.enabled" }}{{- end -}}
{{- if and $values.tls.secretName (eq (toString $values.tls.clientCertificates) "false") (or $values.fleet.enabled (not $values.tokens.secretName)) }}{{- $problems = append $problems "tls.clientCertificates is false: set tokens.secretName, without fleet.enabled (hosts know each other by certificates)" }}{{- end -}}
{{- if and $values.masterKey.secretName (not $isStored) }}{{- $problems = append $problems "masterKey.secretName is set and nothing is stored outside memory: set policy.tiers.nvme.capacity or policy.object.url" }}{{- end -}}
{{- $remote := list -}}
{{- range $urls }}{{- if not (hasPrefix "file:" .) }}{{- $remote = append $remote . }}{{- end }}{{- end -}}
{{- if and $remote $values.networkPolicy.enabled (not $values.networkPolicy.egress) }}{{- $problems = append $problems "policy.object.url is set and the NetworkPolicy lets nothing out: add the store to networkPolicy.egress" }}{{- end -}}
{{- if and $values.objectStore.secretName (not $urls) }}{{- $problems = append $problems "objectStore.secretName is set and there is no store: set policy.object.url" }}{{- end -}}
{{- if and $values.objectStore.expireSchedule (ne (len $urls) 1) }}{{- $problems = append $problems "objectStore.expireSchedule is for one store: set policy.object.url, the same for all nodeGroups" }}{{- end -}}
{{- if and $values.fleet.enabled (not $values.grpc.enabled) }}{{- $problems = append $problems "fleet.enabled needs a port at which hosts call each other: set grpc.enabled" }}{{- end -}}
{{- if and $values.fleet.enabled (or (eq (int $values.fleet.dataPort) (int $values.grpc.port)) (eq (int $values.fleet.dataPort) (int $values.http.port))) }}{{- $problems = append $problems "fleet.dataPort is the port of grpc or http: change one" }}{{- end -}}
{{- with $values.fleet.directory -}}
{{- if and .url (not $values.fleet.enabled) }}{{- $problems = append $problems "fleet.directory is where the hosts of a fleet meet: set fleet.enabled" }}{{- end -}}
{{- if and (or .index .secretName) (not .url) }}{{- $problems = append $problems "fleet.directory has no url: write redis://HOST:PORT or etcd://HOST:PORT" }}{{- end -}}
{{- if and .url $values.networkPolicy.enabled (not $values.networkPolicy.egress) }}{{- $problems = append $problems "fleet.directory.url is set and the NetworkPolicy lets nothing out: add the directory to networkPolicy.egress" }}{{- end -}}
{{- end -}}
{{- if eq (int $values.grpc.port) (int $values.http.port) }}{{- $problems = append $problems "grpc.port and http.port are the same: change one" }}{{- end -}}
{{- if gt (len (include "kvtier.target" .root)) 107 }}{{- $problems = append $problems "socket.hostPath is too long for a socket: at most 87 characters" }}{{- end -}}
{{- range .shapes -}}
{{- $readers := dig "observe" "readers" "" .policy -}}
{{- $needsToken := or (kindIs "slice" $readers) (and .policy.tenants (not $values.networkPolicy.enabled) (ne (toString $readers) "anyone")) -}}
{{- $silent := or (and $values.podMonitor.enabled (not $values.podMonitor.authorization)) (and $values.serviceMonitor.enabled (not $values.serviceMonitor.authorization)) -}}
{{- if and $needsToken $silent }}{{- $problems = append $problems "the monitor would be refused, because readers have tokens: name one in policy.observe.readers and give it in podMonitor.authorization (serviceMonitor's likewise), or enable networkPolicy and leave readers to the chart" }}{{- end -}}
{{- end -}}
{{- if and $values.podMonitor.enabled $values.serviceMonitor.enabled }}{{- $problems = append $problems "podMonitor and serviceMonitor would count everything twice: enable one" }}{{- end -}}
{{- toJson $problems -}}
{{- end -}}
