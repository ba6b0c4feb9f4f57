"""Sight: what the daemon shows of itself. Reads everything, decides nothing.

    telemetry   who asked for what and where it was, by session          (told of every step)
    census      bytes of each tier by urgency                            (on demand)
    health      whether what must go on goes on: readiness
    sampler     a few numbers a second, as far back as five minutes
    snapshot    all of that as one value, for `kvtier top` and the page
    metrics     the same for Prometheus; its table is docs/metrics.md
    web         the one HTTP listener: /metrics, /healthz, /readyz, /api
    tracing     get, plan and copy as OpenTelemetry spans                (extra `otel`)
    kv_events   block events for routers, as vLLM publishes them         (extra `events`)
    logs        text or JSON, by allow-list

Everything here may be taken away without the appliance noticing: nothing in the core imports it.
"""
