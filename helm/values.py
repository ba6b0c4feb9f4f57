"""The values of the Helm chart, as one model: values.yaml, values.schema.json and the chart's README are
printed from it (chart_files.py), so that a value, its default and its sentence are written once.

`policy` *is* the daemon's `Settings`: what `kvtier policy validate` refuses, `helm install` refuses, too.
Kubernetes' own parts (tolerations, affinity, volumes) are taken as they are: copying their schema here would
only age. What the schema cannot say, a combination of values, is refused by templates/_validation.tpl with a
sentence.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from kvtier.appliance.config import Settings

Port = Annotated[int, Field(ge=1, le=65535)]
UserId = Annotated[int, Field(ge=1, le=2**31 - 1)]
Positive = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?$")]
Path = Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._-]+)+$")]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kMGTP]i?)?$")]
Strings = dict[str, str]
Kubernetes = dict[str, Any]  # a part of a manifest, handed on as it is


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        alias_generator=to_camel,
        populate_by_name=True,
    )


class Image(_Model):
    """Which image the daemon is run from; deploy/docker/Dockerfile makes it."""

    repository: str = "kvtier"
    """Registry and name. There is no public image: build one and name it here."""
    tag: str = ""
    """Tag; empty: the chart's appVersion."""
    digest: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")] = ""
    """Digest (sha256:...); goes before the tag."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When it is pulled."""


class HostPath(_Model):
    """A directory of the node."""

    path: Path | Literal[""] = ""
    """The directory, on the NVMe device's file system. Empty: not this way."""
    type: Literal["Directory", "DirectoryOrCreate"] = "Directory"
    """`Directory`: the pod waits when the device is not mounted. DirectoryOrCreate would fill the root
    disk."""


class VolumeClaim(_Model):
    """A volume of the pod's own (generic ephemeral volume), from a provisioner of local disks. It ends with
    the pod."""

    storage_class_name: str = ""
    """StorageClass, e.g. of TopoLVM or OpenEBS. Empty: not this way."""
    size: Quantity | Literal[""] = ""
    """How large, e.g. 1Ti; a tenth more than policy.tiers.nvme.capacity."""


class ColdStoreVolume(_Model):
    """Where the segment files of tier nvme lie: one of three ways, or none. policy.tiers.nvme.capacity says
    how much of it is used."""

    host_path: HostPath = HostPath()
    volume_claim: VolumeClaim = VolumeClaim()
    existing_claim: str = ""
    """Name of a claim on a local persistent volume; for a group of one node. Empty: not this way."""


class HugePages(_Model):
    """Pages of 2MiB, preallocated on the node (vm.nr_hugepages)."""

    enabled: bool = False
    """Take dram (and hbm with backend host) from them. They are requested from Kubernetes and `hugepages` is
    set to `on`; else it is set to `off`, because a pod that did not request them is killed when it touches
    one."""


class GpuAccess(_Model):
    """How the daemon reaches GPUs that the runtimes have requested."""

    sharing: Literal["none", "ipc"] = "none"
    """`ipc`: the daemon sees the node's GPUs without requesting one (that would take it from the runtime) and
    shares memory by CUDA IPC: it gets runtimeClassName, NVIDIA_VISIBLE_DEVICES and hostIPC. Runtime pods need
    `hostIPC: true`, too. hostIPC shows the pod the System V and POSIX shared memory of the whole node."""
    runtime_class_name: str = "nvidia"
    """RuntimeClass of the NVIDIA container toolkit. Empty: it is the node's default runtime."""
    visible_devices: str = "all"
    """NVIDIA_VISIBLE_DEVICES."""


class Resources(_Model):
    """What a pod asks for. Memory is computed: what the policy's memory tiers take, and `memoryOverhead`."""

    cpu: Quantity | Positive = "2"
    """Requested cores. There is no limit: throttling an event loop makes every call late."""
    memory_overhead: Quantity = "4Gi"
    """Memory beside the tiers: the process, the catalog (about 0.3Gi per million fragments), a staging extent
    per client (limits.staging_per_client)."""


class NodeShape(_Model):
    """What may differ between groups of nodes."""

    policy: Settings = Settings()
    """The policy file; see docs/policy-settings.md. Reloaded while the daemon runs when `helm upgrade`
    changes what is live; else the pods are replaced. listen, observe.http, tiers.nvme.path,
    tiers.dram.hugepages, access.tls, access.tokens and encryption are the chart's to fill in, and of peers
    all but send_limit."""
    node_selector: Strings = {}
    """Labels of the nodes to run on; must be set, here or in every node group, unless `affinity` requires
    some. Nodes with NVIDIA GPUs where GPU feature discovery runs: {nvidia.com/gpu.present: "true"}. Every
    Linux node: {kubernetes.io/os: linux}."""
    affinity: Kubernetes = {}
    """Affinity, as in a pod."""
    tolerations: list[Kubernetes] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    """Tolerations, as in a pod."""
    cold_store: ColdStoreVolume = ColdStoreVolume()
    huge_pages: HugePages = HugePages()
    gpu: GpuAccess = GpuAccess()
    resources: Resources = Resources()


class NodeGroup(NodeShape):
    """One group of nodes: a DaemonSet of its own. What is not given is as for all."""

    name: Name
    """Ends the DaemonSet's name."""


class Socket(_Model):
    """The Unix socket that runtimes on the node connect to."""

    host_path: Path = "/run/kvtier"
    """Folder on the node; runtime pods mount it at the same path."""


class Grpc(_Model):
    """gRPC over TCP, for clients that do not share the node's memory."""

    enabled: bool = False
    """Listen. Needs tls.secretName, or `policy.access.insecure: true`."""
    port: Port = 50051
    """Port of pod and Service."""


class SecretName(_Model):
    """A Secret in the release's namespace."""

    secret_name: str = ""
    """Name of the Secret. Empty: none."""


class Directory(SecretName):
    """etcd, Redis or Valkey in which hosts find each other beside the headless Service, such as those of
    several clusters. The Secret has the files `password`, `ca.crt`, `tls.crt` and `tls.key`, each where the
    directory asks for it."""

    url: str = ""
    """Address, as `peers.directory.url` of docs/policy-settings.md. Empty: no directory. Name it in
    networkPolicy.egress, too."""
    index: bool = False
    """Keep in Redis or Valkey which host holds what, instead of a stream between every two hosts: above 64
    hosts or so."""


class Fleet(_Model):
    """Daemons that read from each other's memory before they compute (docs/operate/fleet.md): a headless
    Service is the list of hosts. Every daemon of the release is one of them."""

    enabled: bool = False
    """Needs grpc.enabled. With tls.secretName the certificate is that of a host: it has the DNS name
    RELEASE-hosts.NAMESPACE.svc, which no client has, and is for servers and clients."""
    data_port: Port = 50052
    """Port of the pods at which hosts read bytes from each other."""
    directory: Directory = Directory()


class TlsSecret(SecretName):
    """Certificates of the gRPC port: a Secret with tls.crt, tls.key and ca.crt, as cert-manager makes them.
    Read again when it changes."""

    client_certificates: bool = True
    """Ask callers for a certificate that ca.crt signed. False: a token alone identifies a caller over TCP;
    needs tokens.secretName, and is not for a fleet (docs/security.md)."""


class TokensSecret(SecretName):
    """Bearer tokens: a Secret with the file that `kvtier tenant token` makes lines for."""

    key: str = "tokens"
    """Key of the file in the Secret."""


class MasterKeySecret(SecretName):
    """The file of master keys: a Secret made beforehand, mounted as a file and never put into the
    environment. What enters the cold store or an object store is encrypted then. A new line on top of the
    file, and the daemons take it within a minute or two, without a restart (docs/operate/encryption.md)."""

    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$")] = "master.key"
    """Key of the file in the Secret."""


class ObjectStore(_Model):
    """Credentials and housekeeping of the store that `policy.object.url` names
    (docs/operate/object-store.md)."""

    secret_name: str = ""
    """Name of a Secret, each key of which becomes an environment variable of the daemon: AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL and the like. Pods have to be replaced to see another
    value. Empty: the store knows the pods by a role of their service account, or asks for nothing."""
    expire_schedule: str = ""
    """When a CronJob runs `kvtier objects expire --delete`, e.g. "17 3 * * *". For a store without lifecycle
    rules. Empty: never."""


class Http(_Model):
    """Metrics, readiness and the page; read-only. With tenants they are for all callers that the
    NetworkPolicy admits, or for the tokens of `policy.observe.readers`; without that policy for those tokens
    only."""

    port: Port = 9464
    """Port of pod and Service."""


class Security(_Model):
    """What the daemon's process may do. By default: nothing beyond its own files."""

    run_as_user: UserId = 10001
    """User id; never root. It is an administrator of the daemon (probes and preStop run as it)."""
    run_as_group: UserId = 10001
    """Group id. Runtime pods that do not run as root need it in `supplementalGroups` to open the socket."""
    prepare_folders: bool = True
    """Let an init container give the host folders to runAsGroup: it is root, without any capability, and runs
    chgrp and chmod. false: set the group on the nodes yourself, e.g. by tmpfiles.d."""
    seccomp_profile: Kubernetes = {"type": "RuntimeDefault"}
    """Seccomp profile, as in a pod."""
    se_linux_options: Kubernetes = {}
    """SELinux label, as in a pod. {level: s0} on nodes in enforcing mode (OpenShift): without it runtimes of
    other namespaces cannot open the socket (docs/operate/kubernetes.md)."""


class Probes(_Model):
    """Periods and limits of the startup and liveness probes."""

    startup_period_seconds: Positive = 5
    """Seconds between two probes while the cold store is recovered."""
    startup_failure_threshold: Positive = 60
    """Failed startup probes after which the pod is restarted."""
    period_seconds: Positive = 10
    """Seconds between two probes afterwards."""
    liveness_failure_threshold: Positive = 6
    """Failed liveness probes after which the pod is restarted. The probe fails only for a daemon with a
    failed planner or a blocked event loop."""


class Drain(_Model):
    """How a pod ends: refuse new work, end leases, write what only memory holds, seal, exit 0."""

    grace_seconds: Positive = 60
    """How long that may take; terminationGracePeriodSeconds is 30 more."""


class Selectors(_Model):
    """Pods that reach the ports, as `from` of a NetworkPolicy."""

    enabled: bool = True
    """Make a NetworkPolicy. It governs TCP only: access to the Unix socket needs a mount of its folder."""
    metrics_from: list[Kubernetes] = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]
    """Pods that read metrics and the page."""
    callers_from: list[Kubernetes] = [{"namespaceSelector": {"matchLabels": {"kvtier.io/caller": "true"}}}]
    """Pods that call gRPC, when it is enabled."""
    egress: list[Kubernetes] = []
    """Egress rules, beside those between the hosts of a fleet; with any, DNS is let out, too. The daemon
    connects to what `policy.object.url` and `policy.observe.traces: otlp` name, and nowhere else."""


class Monitor(_Model):
    """What the Prometheus operator scrapes."""

    enabled: bool = False
    """Make it. Needs the operator's custom resources."""
    interval: str = "30s"
    """How often."""
    authorization: Kubernetes = {}
    """Where `policy.observe.readers` names tokens: {credentials: {name: SECRET, key: KEY}} with one of
    them."""
    labels: Strings = {}
    """Labels that your Prometheus selects by."""
    relabelings: list[Kubernetes] = []
    """Relabelings before the scrape."""
    metric_relabelings: list[Kubernetes] = []
    """Relabelings of what was scraped."""


class Shown(_Model):
    """What Grafana or the Prometheus operator picks up by its labels."""

    enabled: bool = False
    """Make it."""
    labels: Strings = {}
    """Labels it is found by."""


class Connection(_Model):
    """The ConfigMap that runtimes take their configuration from (`envFrom`)."""

    namespaces: list[str] = []
    """Namespaces that get a copy, beside the release's own."""


class ServiceAccount(_Model):
    """The pod's service account; it has no rights and no token."""

    create: bool = True
    """Make one."""
    name: str = ""
    """Its name; empty: the release's."""
    annotations: Strings = {}
    """Its annotations."""


class ChartValues(NodeShape):
    """All values of the chart."""

    name_override: str = ""
    """Instead of the chart's name."""
    fullname_override: str = ""
    """Instead of release and chart name."""
    image: Image = Image()
    image_pull_secrets: list[Strings] = []
    """Secrets to pull the image with, e.g. [{name: registry}]."""
    node_groups: list[NodeGroup] = []
    """Nodes of several shapes: a DaemonSet for each, e.g. {name: h200, nodeSelector: {...}, policy: {...}};
    maps are merged with what is given for all. Empty: one DaemonSet."""
    socket: Socket = Socket()
    grpc: Grpc = Grpc()
    fleet: Fleet = Fleet()
    object_store: ObjectStore = ObjectStore()
    tls: TlsSecret = TlsSecret()
    tokens: TokensSecret = TokensSecret()
    master_key: MasterKeySecret = MasterKeySecret()
    http: Http = Http()
    listen_host: Literal["0.0.0.0", "[::]"] = "0.0.0.0"
    """Address that both ports listen at; [::] in clusters with IPv6."""
    security: Security = Security()
    probes: Probes = Probes()
    drain: Drain = Drain()
    max_unavailable: Positive = 1
    """Pods that an upgrade replaces at the same time."""
    priority_class_name: str = ""
    """PriorityClass; above that of the runtimes, or a full node has no room for the daemon."""
    service_account: ServiceAccount = ServiceAccount()
    connection: Connection = Connection()
    network_policy: Selectors = Selectors()
    pod_monitor: Monitor = Monitor()
    service_monitor: Monitor = Monitor()
    """Instead of podMonitor, where only those are selected."""
    dashboard: Shown = Shown(labels={"grafana_dashboard": "1"})
    """The Grafana dashboard, as a ConfigMap for its sidecar."""
    prometheus_rule: Shown = Shown()
    """The alert rules, as a PrometheusRule."""
    pod_annotations: Strings = {}
    """Annotations of the pods."""
    pod_labels: Strings = {}
    """Labels of the pods."""
    extra_args: list[str] = []
    """Arguments of `kvtier serve`, e.g. [--set, leases.ttl=1m]; they go before the policy."""
    extra_env: list[Kubernetes] = []
    """Environment variables, as in a container."""
    extra_volumes: list[Kubernetes] = []
    """Volumes, as in a pod."""
    extra_volume_mounts: list[Kubernetes] = []
    """Mounts, as in a container."""


#: What `policy` holds by default: what a first installation should see, all else is the daemon's default.
DEFAULT_POLICY: dict[str, Any] = {
    "schema_version": 1,
    "tiers": {"dram": {"capacity": "16GiB"}},
    "observe": {"log": "json"},
}
