"""The `observe:` section of the settings: what the daemon shows of itself, and to whom.

observe:
  http: 127.0.0.1:9464     # metrics, readiness and the page; `off` for none
  log: json
  traces: otlp             # where to: the OTEL_EXPORTER_OTLP_* variables
  kv_events: tcp://127.0.0.1:5557
"""

import ipaddress
from typing import Annotated, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema, model_validator

from .settings_fields import refuse

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


Http = Annotated[str, BeforeValidator(_http), WithJsonSchema({"type": ["string", "boolean"]})]
Endpoint = Annotated[str, BeforeValidator(_endpoint), WithJsonSchema({"type": ["string", "boolean"]})]
LogFormat = Literal["text", "json"]
Traces = Annotated[
    Literal["off", "console", "otlp"], BeforeValidator(lambda value: "off" if value is False else value)
]


class Observe(BaseModel):
    """What the daemon shows of itself."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    http: Http = "auto"
    """IP:PORT of metrics, readiness and the page; read-only. `auto`: 127.0.0.1:9464 when that is free."""
    names: bool = False
    """Show session ids and block hashes on the page, to everybody on this host."""
    log: LogFormat = "text"
    """How the log is written: for people, or one JSON object a line."""
    traces: Traces = "off"
    """Where spans of get, plan and copy go; needs `pip install 'kvtier[otel]'`."""
    kv_events: Endpoint = "off"
    """Address to publish block events at as vLLM does, for routers; needs `pip install 'kvtier[events]'`."""
    kv_events_replay: Endpoint = "off"
    """Address where routers ask for events they missed."""

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

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        address = self.http_address
        if self.names and address is not None and not ipaddress.ip_address(address.host).is_loopback:
            refuse("names", f"other hosts reach {self.http}; listen at 127.0.0.1, or write false")
        if self.kv_events_replay != "off" and self.kv_events == "off":
            refuse("kv_events_replay", "there is nothing to replay; set kv_events, or write off")
        return self
