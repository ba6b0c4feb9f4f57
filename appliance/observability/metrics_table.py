"""Every number that Prometheus gets, in one table.

    name, kind, labels, what it is, what it is for, where it is read, what must hold

Labels come from closed sets only: never a session, a block, a namespace or text of a client. docs/metrics.md
is printed from here, and the dashboard and the alert rules are checked against it.
"""

from . import metrics_sources as sources
from .metrics import Metric

#: Every label and the closed set its values come from.
LABELS = {
    "cause": "words of `Cause` in `tiers/base.py`",
    "code": "status codes of gRPC",
    "codec": "names of `tiers/codecs/registry.py`",
    "direction": "`encode`, `decode`; of an object store and of other hosts `sent`, `received`",
    "file": "`certificate`, `client_ca`: keys of `access.tls`",
    "form": "`raw`, `stored`",
    "master_key": "ids of the lines in the file of `encryption.master_key`, 16 at most",
    "method": "rpcs of `proto/kvtier/v1`",
    "operation": "`get`, `head`, `put`, `copy`, `list`, `delete`",
    "outcome": "named with the metric",
    "reason": "why a block leaves (words of `appliance/core`), a reason of the error table, or of a bill "
    "(`storage`, `puts`, `gets`, `egress`)",
    "source": "`staging`, names of tiers",
    "state": "`resident`, `reserved`, `condemned`; of hosts `live`, `down`",
    "target": "names of tiers",
    "tenant": "domains of the tenants in the policy; `common:`, and `other:` for all others",
    "tier": "`hbm`, `dram`, the names of further memories in the settings, `nvme`",
    "transport": "`local`, `grpc`",
    "urgency": "`decoding`, `prefill`, `queued`, `waiting`, `idle`, `ended`; of bytes also `none`",
    "version": "the one that runs",
    "work": "`search`, `fetch`, `export`",
}


def _tier(name: str, what: str, use: str, key: str, invariant: str = "") -> Metric:
    return Metric(f"kvtier_tier_{name}", "gauge", ("tier",), what, use, sources.tier(key), invariant)


def _write(name: str, what: str, use: str, key: str) -> Metric:
    return Metric(f"kvtier_{name}", "gauge", (), what, use, sources.writes(key))


def _count(name: str, what: str, use: str, key: str, kind: str = "gauge", invariant: str = "") -> Metric:
    return Metric(f"kvtier_{name}", kind, (), what, use, sources.number(key), invariant)


SERVICE = (
    Metric("kvtier_build_info", "gauge", ("version",), "1, with the version that runs.",
           "Which nodes run which version during a rollout.", sources.build_info),
    Metric("kvtier_uptime_seconds", "gauge", (), "Time since the daemon started.",
           "Restarts: it falls.", sources.uptime),
    Metric("kvtier_ready", "gauge", (), "1 while calls are served, 0 while stalled, draining or failed.",
           "The same truth as /readyz, for alerts.", sources.ready),
    Metric("kvtier_policy_generation", "gauge", (), "Number of the policy in force, from 1.",
           "Whether a new policy has reached every node.", sources.generation),
    Metric("kvtier_policy_reloads_total", "counter", ("outcome",),
           "Policies `applied` or `refused` since the start.",
           "A refused one: the last good one stays in force, and the log says which line to mend.",
           sources.reloads),
    Metric("kvtier_policy_refused", "gauge", (), "1 while the policy file is refused as it was read last.",
           "What runs is not what the file says. The log, `kvtier status` and `kvtier doctor` say why.",
           sources.policy_refused),
    Metric("kvtier_tls_end_timestamp_seconds", "gauge", ("file",),
           "Until when certificate and authority of `access.tls` are valid, in seconds since 1970. Of "
           "several authorities it is the one that lasts longest.",
           "Runtimes and hosts are refused afterwards.", sources.tls_ends),
    Metric("kvtier_loop_late_seconds", "histogram", (),
           "How late the event loop came to a timer that was due, once a second.",
           "A daemon that is busy with something else: every call waits that long.", sources.loop_late),
    Metric("kvtier_rpc_seconds", "histogram", ("method", "transport", "code"),
           "Duration of calls inside the daemon, to the last answer.",
           "Where latency comes from: the daemon, or what is around it.", sources.rpc_seconds),
    Metric("kvtier_refusals_total", "counter", ("reason",), "Requests the planner refused, by reason.",
           "TIER_FULL and TOO_MANY_IN_FLIGHT: limits to raise; others: a client to mend.", sources.refusals),
)  # fmt: skip

TIERS = (
    _tier("capacity_bytes", "Bytes a tier can hold.", "To divide by.", "capacity_bytes"),
    Metric("kvtier_tier_bytes", "gauge", ("tier", "state"),
           "Bytes of a tier: readable, promised to copies, or invisible and still touched.",
           "How full a tier is, and of what.", sources.tier_bytes,
           "the sum over `state` is at most `kvtier_tier_capacity_bytes`"),
    Metric("kvtier_tier_urgency_bytes", "gauge", ("tier", "urgency"),
           "Readable bytes by the urgency of the session that used them last; none: used without a session, "
           "or not since the start.",
           "Whether the fast tiers hold what is needed soon.", sources.urgency_bytes,
           "the sum over `urgency` is `kvtier_tier_bytes{state=\"resident\"}`, as counted last"),
    _tier("pinned_bytes", "Bytes that pins keep at or above a tier.", "Pins that crowd out the rest.",
          "pinned_bytes"),
    _tier("fragments", "Readable fragments.", "Mean fragment size; growth of the catalog.", "num_fragments"),
    Metric("kvtier_tier_offline", "gauge", ("tier",), "1 when a tier stopped working.",
           "Look at the log, and at a GPU. The tier is gone until a restart.", sources.tier_offline),
    _write("only_in_memory_blocks", "Blocks that tier nvme has not, or not all of.",
           "What a death of the process would take.", "num_blocks_only_in_memory"),
    _write("only_in_memory_bytes", "Bytes of payload of those.", "The same in bytes.",
           "only_in_memory_bytes"),
    _write("nvme_written_day_bytes", "Bytes written to tier nvme in the last 24 hours, headers included.",
           "Wear: divided by the drive's capacity these are its drive writes per day.", "written_bytes"),
    _write("nvme_daily_writes_bytes", "`tiers.nvme.daily_writes`; not there when it is `unlimited`.",
           "To divide by.", "daily_bytes"),
    _write("nvme_daily_left_bytes", "What idle copies may write now; 0 when it is `unlimited`.",
           "0 for long: idle copies wait, and blocks stay only in memory.", "left_bytes"),
    Metric("kvtier_evicted_blocks_total", "counter", ("tier", "reason"),
           "Blocks that left a tier, by reason.",
           "Evictions by reason; `kvtier why block` explains one.", sources.evicted),
    Metric("kvtier_corrupt_fragments_total", "counter", ("tier",),
           "Fragments that failed verification, at a read or in the background, and were dropped.",
           "A device that goes bad. More than a few: replace it.", sources.corrupt),
    Metric("kvtier_scrubbed_bytes_total", "counter", ("tier",),
           "Bytes of a tier that verification has read, in the background or on demand.",
           "Whether it goes on, and its pace.", sources.scrub("num_bytes")),
    Metric("kvtier_scrub_passes_total", "counter", ("tier",),
           "Complete verifications of a tier since the start.",
           "How long rot can stay unnoticed: the time between two.", sources.scrub("num_passes")),
)  # fmt: skip

ASKED = (
    Metric("kvtier_asked_blocks_total", "counter", (), "Blocks that clients asked to read.",
           "The denominator of every hit ratio.", sources.total("num_asked")),
    Metric("kvtier_lookup_blocks_total", "counter", ("outcome",),
           "Asked blocks by where they were: the name of a tier, `missed`, or `declined` (stored, and "
           "computing is quicker or the client holds its share).",
           "Hit ratio, and which tier earns it.", sources.lookup_blocks,
           "the sum over `outcome` is `kvtier_asked_blocks_total`"),
    Metric("kvtier_read_bytes_total", "counter", (), "Bytes of blocks that clients got to read.",
           "What the appliance delivers.", sources.total("read_bytes")),
    Metric("kvtier_stored_blocks_total", "counter", (), "New blocks that puts have stored.",
           "Writes; against evictions: churn.", sources.total("num_stored")),
    Metric("kvtier_stored_bytes_total", "counter", (), "Bytes of those.", "Writes in bytes.",
           sources.total("stored_bytes")),
    Metric("kvtier_saved_seconds_total", "counter", (),
           "Prefill time that found blocks saved, less their loading, as the cost model has it.",
           "What the appliance is worth: seconds of GPU per second.", sources.total("saved_s")),
    Metric("kvtier_prefetch_begun_blocks_total", "counter", (),
           "Blocks that began to come up before anyone asked.",
           "How much is guessed.", sources.counter("prefetch_begun"),
           "it is the sum of `kvtier_prefetch_blocks_total` and `kvtier_prefetch_awaited_blocks`"),
    Metric("kvtier_prefetch_blocks_total", "counter", ("outcome",),
           "What became of them: `used`, `late` (asked for on their way), `wasted`, "
           "`cancelled` (no byte moved).",
           "Waste above a third: a predictor to change.", sources.prefetch_blocks),
    _count("prefetch_awaited_blocks", "Prefetched blocks not used yet.", "What guesses hold.", "num_awaited"),
)  # fmt: skip

COPIES = (
    Metric("kvtier_copies_total", "counter", ("source", "target", "outcome"),
           "Fragments copied along an edge: `landed` or `failed`.", "Traffic in fragments; failing devices.",
           sources.copies),
    Metric("kvtier_copy_bytes_total", "counter", ("source", "target"), "Bytes copied along an edge.",
           "Traffic between tiers.", sources.edge("num_bytes")),
    Metric("kvtier_tenant_copy_bytes_total", "counter", ("tenant", "source", "target"),
           "Bytes of one tenant's fragments copied along an edge.",
           "Each tenant's use of bandwidth, to compare with `bandwidth_share`.", sources.tenant_copy_bytes,
           "the sum over `tenant` is `kvtier_copy_bytes_total`"),
    Metric("kvtier_nvme_failures_total", "counter", ("cause",),
           "Records of the cold store that were not read or written, by cause. Each is a miss.",
           "`not_authentic`: the device was changed. `no_key`: of a tenant that was erased.",
           sources.nvme_failures),
    Metric("kvtier_master_key_wraps", "gauge", ("master_key",),
           "Tenants' keys that each master key wraps, by its id.",
           "After a change of the master key: when the sum over all nodes is 0 the old line may go.",
           sources.master_key_wraps, "the sum over `master_key` is the tenants that have a key"),
    Metric("kvtier_master_key_file_refused", "gauge", (),
           "1 while the file of master keys cannot be used as it was read last; those read before hold.",
           "The next start would fail. The log and `kvtier status` say what to mend.",
           sources.master_key_file_refused),
    Metric("kvtier_copy_seconds", "histogram", ("source", "target"),
           "Duration of batches of copies, from being handed to the device.",
           "A device that becomes slow.", sources.edge("seconds")),
    Metric("kvtier_copies_in_flight", "gauge", ("source", "target"), "Batches in flight on an edge.",
           "Saturation: it stands at the limit of the edge, 8 between nvme and host memory.",
           sources.edge("num_in_flight")),
    Metric("kvtier_copies_queued", "gauge", ("source", "target"), "Batches waiting for an edge.",
           "Demand beyond what the edge can do.", sources.edge("num_queued")),
    Metric("kvtier_edge_bytes_per_second", "gauge", ("source", "target"),
           "Bandwidth of an edge while it is busy, as lately measured; 0 before that.",
           "What load-or-recompute is decided by.", sources.edge("bandwidth_bytes_per_s")),
    Metric("kvtier_edge_latency_seconds", "gauge", ("source", "target"),
           "Time an edge takes to begin, as lately measured.", "The same.", sources.edge("latency_s")),
)  # fmt: skip

CODECS = (
    Metric("kvtier_codec_fragments_total", "counter", ("codec", "outcome"),
           "Fragments `encoded`, `unfit` (too long once encoded, stored as they are), `decoded`, "
           "`refused` (what nothing encodes to: a damaged record, dropped) or `unreadable` (what its codec "
           "needs is missing: kept, a miss until that is back).",
           "Which codecs are at work.",
           sources.codec(encoded="num_encoded", unfit="num_unfit", decoded="num_decoded",
                         refused="num_refused", unreadable="num_unreadable")),
    Metric("kvtier_codec_bytes_total", "counter", ("codec", "form"),
           "Bytes of encoded fragments: `raw` as they were put, `stored` as they lie on the device.",
           "What compression saves: stored over raw.",
           sources.codec(raw="encoded_raw_bytes", stored="encoded_stored_bytes")),
    Metric("kvtier_codec_seconds_total", "counter", ("codec", "direction"),
           "Time of threads spent to `encode` and `decode`.", "What compression costs.",
           sources.codec(encode="encode_s", decode="decode_s")),
)  # fmt: skip

HELD = (
    Metric("kvtier_sessions", "gauge", ("urgency",), "Sessions by urgency.", "Load to come.",
           sources.sessions),
    _count("blocks", "Blocks known, in any tier.", "Size of the catalog.", "num_blocks"),
    _count("namespaces", "Namespaces registered.", "Models and isolation domains in use.", "num_namespaces"),
    Metric("kvtier_clients", "gauge", (), "Clients connected or within their ttl.",
           "How many runtimes are connected.", sources.clients),
    _count("leases", "Leases held.", "Readers at work. It only grows: a leak in a client.", "num_leases"),
    _count("pins", "Pins.", "What is kept on demand.", "num_pins"),
    _count("waiting_requests", "Requests that wait for room.", "A tier too small or slow.", "num_waiting"),
    _count("overdue_bytes", "Bytes held by leases past their deadline that clients may still read.",
           "A client that hangs; its death frees them.", "overdue_bytes"),
    Metric("kvtier_leases_expired_total", "counter", (), "Leases that ended by their deadline.",
           "Clients that die or forget.", sources.counter("leases_expired")),
)  # fmt: skip

SOURCE = (
    Metric("kvtier_source_open", "gauge", (), "1 while the object store is asked, 0 after it has failed.",
           "An outage: blocks are computed here, local service goes on.", sources.source("is_open")),
    Metric("kvtier_source_requests_total", "counter", ("operation", "outcome"),
           "Requests to the object store: `ok`, `missing`, `exists` (stored before), or what failed. Retries "
           "inside the client are not counted.",
           "What is paid for; `busy`: the store asks for less; `denied`: credentials.",
           sources.source_requests),
    Metric("kvtier_source_request_seconds_total", "counter", ("operation",),
           "Time of these requests, of a get with the landing of its bytes.", "Mean latency of the store.",
           sources.source_request_seconds),
    Metric("kvtier_source_bytes_total", "counter", ("direction",), "Bytes of objects sent and received.",
           "Traffic with the store.", sources.source_bytes),
    Metric("kvtier_source_seconds", "histogram", ("work",),
           "Duration of searches, fetches and exports, which are several requests each.",
           "Fetches slower than prefill: a store that does not pay.", sources.source_seconds),
    Metric("kvtier_source_in_flight", "gauge", (), "Searches, fetches and exports in flight.",
           "Saturation: it stands at 8, or at less after the store said that it is busy.",
           sources.source("num_in_flight")),
    Metric("kvtier_source_fetches_total", "counter", ("outcome",),
           "Bundles fetched: `arrived`, `not_worth` (computing is quicker: not begun), or why one did not "
           "arrive (words of `Cause` in `tiers/base.py`).",
           "What the store brings; `wrong_checksum`: it damages objects.", sources.source_words("fetches")),
    Metric("kvtier_source_fetched_blocks_total", "counter", (), "Blocks that came from the object store.",
           "What other hosts have computed for this one.", sources.source("num_blocks_fetched")),
    Metric("kvtier_source_exports_total", "counter", ("outcome",),
           "Bundles to store: `stored`, `shared_already` (the store has it), `failed`, or why not: "
           "`over_budget`, `not_in_memory`, `not_worth` (by `object.price`, or it is computed sooner), "
           "`too_large`, `dropped` (too many waited), `no_key` (this host cannot use the tenant's key).",
           "What is stored for others, and what keeps the rest.", sources.source_words("exports")),
    Metric("kvtier_source_day_dollars", "gauge", ("reason",),
           "The last 24 hours in dollars, since the start at most, by the prices of `object.price`.",
           "The bill; storage counts what was sent, for the three days that it is kept.",
           sources.source_words("day_dollars")),
)  # fmt: skip

FLEET = (
    Metric("kvtier_hosts", "gauge", ("state",),
           "Other hosts of the fleet: `live` ones are asked, `down` ones are not reached or silent.",
           "A host that is gone: its blocks are computed again.", sources.hosts),
    Metric("kvtier_peer_fetches_total", "counter", ("outcome",),
           "Fetches from other hosts: `arrived`, `refused`, `broken`, `wrong_bytes`, `left_to_store`.",
           "What other hosts bring; `wrong_bytes`: a host or a network to look at.",
           sources.peers("fetches_")),
    Metric("kvtier_peer_tickets_total", "counter", ("outcome",),
           "Tickets for other hosts: `issued`, of these `sent`, `broken` (the other end left) and "
           "`not_used`; `refused`: too many, or beyond `peers.send_limit`.",
           "What this host is for others; `refused`: its network is full.", sources.peers("tickets_")),
    Metric("kvtier_peer_pushes_total", "counter", ("outcome",),
           "What other hosts wrote here by NIXL (`peers.transport`): `arrived`, of these `wrong_bytes`; "
           "`failed` ones came over a data connection. `process_ended`: lives of NIXL's process.",
           "Whether NIXL is used; `failed`: why is in the log.", sources.peers("pushes_")),
    Metric("kvtier_peer_bytes_total", "counter", ("direction",),
           "Payload `sent` to and `received` from other hosts, and what of the first codecs `saved`.",
           "Traffic between hosts.", sources.peers("bytes_")),
    Metric("kvtier_directory_up", "gauge", (),
           "1: the directory of `peers.directory` answers and has this host; 0: it does not.",
           "0: no new host is found; the known ones stay.", sources.directory_up),
    Metric("kvtier_directory_events_total", "counter", ("outcome",),
           "Meetings in the directory: `met`, `failed`, `refused` (it takes no more hosts); what was found "
           "there: `entered_again`, `entries_unreadable`, `twins`.",
           "`failed`, `refused`: the directory; `twins`: two hosts at one address.",
           sources.peers("directory_")),
    Metric("kvtier_index_up", "gauge", (),
           "1: the index of `peers.directory.index` is asked and takes what this host holds; 0: it does not.",
           "0: this host finds nothing at others, or they nothing here.", sources.index_up),
    Metric("kvtier_index_events_total", "counter", ("outcome",),
           "Of the index: `looks`, `bundles_asked`, `looks_left_out`, `failed`; `bundles_added`, "
           "`bundles_removed`, `writes_failed`.",
           "`failed`: other hosts are not asked; `writes_failed`: they do not ask this one.",
           sources.peers("index_")),
)  # fmt: skip

METRICS: tuple[Metric, ...] = (*SERVICE, *TIERS, *ASKED, *COPIES, *CODECS, *SOURCE, *FLEET, *HELD)
GROUPS = {"Service": SERVICE, "Tiers": TIERS, "Blocks asked, stored and prefetched": ASKED,
          "Copies": COPIES, "Codecs": CODECS, "Object store": SOURCE, "Fleet": FLEET,
          "What is held": HELD}  # fmt: skip
