"""The `observe:` section of the settings: metrics, web page, log, traces and events, and their readers.

observe:
  http: 127.0.0.1:9464     # metrics, readiness and the page; `off` for none
  readers: [prometheus]    # tokens that read them; `anyone` without tenants
  log: json
  traces: otlp             # where to: the OTEL_EXPORTER_OTLP_* variables
  kv_events: tcp://127.0.0.1:5557
"""

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, WithJsonSchema, model_validator

from .fields import Section, refuse
from .tenants import Access, Tenant, check_name, tokens_among

DEFAULT_HTTP_PORT = 9464
LOOPBACK = "127.0.0.1"


class HttpAddress(NamedTuple):
    """Where the HTTP listener is. `is_wanted`: it was asked for, so not getting it is an error."""

    host: str
    port: int
    is_wanted: bool


def _http(value: object) -> object:
    """YAML reads `off` as false."""
    if value is False or value in ("off", "auto"):
        return value or "off"
    if not isinstance(value, str):
        raise ValueError("write HOST:PORT, such as 127.0.0.1:9464, or off, or auto")
    parts = urlsplit(f"//{value}")
    try:
        port = parts.port
        ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        port = None
    if port is None or parts.path or parts.username is not None:
        raise ValueError(f"{value!r} is no address; write IP:PORT, such as 127.0.0.1:{DEFAULT_HTTP_PORT}")
    return value


def _endpoint(value: object) -> object:
    if value is False:
        return "off"
    if not isinstance(value, str) or not (value == "off" or value.startswith(("tcp://", "ipc://"))):
        raise ValueError("write tcp://HOST:PORT or ipc:///path, or off")
    return value


def _readers(value: object) -> object:
    if value in ("auto", "anyone"):
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("write names of tokens, such as [prometheus], or anyone, or auto")
    return [check_name(name) for name in value]


Http = Annotated[str, BeforeValidator(_http), WithJsonSchema({"type": ["string", "boolean"]})]
Endpoint = Annotated[str, BeforeValidator(_endpoint), WithJsonSchema({"type": ["string", "boolean"]})]
Readers = Annotated[
    Literal["auto", "anyone"] | list[str],
    BeforeValidator(_readers),
    WithJsonSchema({"anyOf": [{"enum": ["auto", "anyone"]}, {"type": "array", "items": {"type": "string"}}]}),
]
LogFormat = Literal["text", "json"]
Traces = Annotated[
    Literal["off", "console", "otlp"], BeforeValidator(lambda value: "off" if value is False else value)
]


class Observe(Section):
    """Metrics, web page, log, traces and events of the daemon."""

    http: Http = "auto"
    """IP:PORT of metrics, readiness and the read-only page, or `off`. `auto`: 127.0.0.1:9464 if free. Set it
    where Prometheus runs on another host."""
    readers: Readers = "auto"
    """Tokens, by name in `access.tokens`, that may read metrics and the page and nothing else; or `anyone`.
    `auto`: anyone without `tenants`, none with them. Set it with `tenants`, for Prometheus. Readiness is
    always public."""
    names: bool = False
    """Shows session ids and block hashes on the page, to every reader. Turn on while debugging one
    session."""
    log: LogFormat = "text"
    """Format of the log: `text`, or `json` with one object a line. Set `json` where a collector reads it."""
    traces: Traces = "off"
    """Exporter of spans of get, plan and copy: `otlp` (OTEL_EXPORTER_OTLP_* variables), `console` for
    debugging, or `off`. Set it where requests are traced; needs `pip install 'kvtier[otel]'`."""
    kv_events: Endpoint = "off"
    """Address to publish block events on in vLLM's format; set it for KV-aware routers; needs `pip install
    'kvtier[events]'`. Routers fetch events they missed at the next port, or at the path with `.replay`. With
    `tenants` only ipc:///path is allowed, unless readers is `anyone`."""

    @property
    def http_address(self) -> HttpAddress | None:
        """Where to listen, None for nowhere."""
        if self.http == "off":
            return None
        if self.http == "auto":
            return HttpAddress(LOOPBACK, DEFAULT_HTTP_PORT, False)
        parts = urlsplit(f"//{self.http}")
        assert parts.hostname is not None
        assert parts.port is not None
        return HttpAddress(parts.hostname, parts.port, True)

    @property
    def reader_tokens(self) -> frozenset[str]:
        """Names of the tokens that read metrics and the page."""
        return frozenset() if isinstance(self.readers, str) else frozenset(self.readers)

    def is_for_anyone(self, has_tenants: bool) -> bool:
        """Return whether metrics and the page are shown without a token."""
        return self.readers == "anyone" or (self.readers == "auto" and not has_tenants)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        address = self.http_address
        if self.names and address is not None and not ipaddress.ip_address(address.host).is_loopback:
            refuse("names", f"other hosts reach {self.http}; listen at 127.0.0.1, or write false")
        return self


def check_readers(observe: Observe, access: Access, tenants: Mapping[str, Tenant]) -> None:
    """Refuse what shows one tenant another one's doings, or gives a reader more than looking."""
    if observe.reader_tokens and access.tokens is None:
        refuse("observe.readers", "there is no file of tokens; set access.tokens, or write anyone")
    taken = {*tokens_among([*access.admin, *(one for tenant in tenants.values() for one in tenant.members)])}
    if both := sorted(observe.reader_tokens & taken):
        refuse("observe.readers", f"{both[0]} is a tenant's or an administrator's token; make one of its own")
    is_published = observe.kv_events != "off" and not is_private(observe.kv_events)
    if tenants and observe.readers != "anyone" and is_published:
        words = "publishes the blocks of all tenants to every subscriber"
        refuse("observe.kv_events", f"{words}; write ipc:///path, or readers: anyone")


def is_private(endpoint: str) -> bool:
    """Return whether a ZeroMQ endpoint is a file, so that its mode limits access."""
    return endpoint.startswith("ipc:///")
