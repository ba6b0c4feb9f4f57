"""Metrics, snapshot, telemetry, health and traces of the daemon. Reads everything, decides nothing.

    telemetry   requests, hits and savings, in total and by session      (called at every step)
    census      bytes of each tier by urgency                            (on demand)
    health      whether planner, copies and store make progress: readiness
    sampler     a few numbers a second, as far back as five minutes
    snapshot    all of that as one value, for `kvtier top` and the page
    metrics     the same for Prometheus; its table is docs/metrics.md
    web         the one HTTP listener: /metrics, /healthz, /readyz, /api
    tracing     get, plan and copy as OpenTelemetry spans                (extra `otel`)
    kv_events   block events for routers, as vLLM publishes them         (extra `events`)
    logs        text or JSON, by allow-list

The appliance runs without this folder; only `host`, `replay`, `calibrate` and `cli` import it.
"""
