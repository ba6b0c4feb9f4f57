"""`peers:` is refused, with the fix, where hosts could not reach or not know each other."""

from typing import Any

import pytest
from pydantic import ValidationError

from kvtier.appliance.config import Settings

TLS = {"certificate": "/c.pem", "key": "/k.pem", "client_ca": "/ca.pem"}
TCP = ["unix:///k.sock", "0.0.0.0:7070"]
HOSTS = {"hosts": ["10.0.0.1:7070", "kvtier-hosts.inference.svc:7070"]}
ACME = {"acme": {"members": ["uid:7"]}}


def settings(**values: Any) -> Settings:
    """Return settings of a host on plain TCP with `peers`, and what a test changes."""
    return Settings.model_validate({"listen": TCP, "access": {"insecure": True}, "peers": HOSTS, **values})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"listen": TCP[:1]}, "other hosts call this one: add host:port"),
        ({"access": {"tls": TLS}}, "a name in all hosts' certificates"),
        (
            {"access": {"tls": {**TLS, "client_ca": None}, "tokens": "/tokens"}},
            "give access.tls.client_ca",
        ),
        ({"tenants": ACME}, "with tenants hosts have to prove that they are hosts; set access.tls"),
        ({"peers": {"hosts": ["unix:///k.sock"]}}, "write host:port as in its `listen`"),
        ({"peers": {"hosts": ["10.0.0.1:0"]}}, "write host:port as in its `listen`"),
        ({"peers": {**HOSTS, "send_limit": "0B"}}, "0 sends nothing"),
        (
            {
                "access": {"tls": TLS},
                "tenants": ACME,
                "peers": {**HOSTS, "certificate_name": "hosts.svc", "transport": "nixl"},
            },
            "with tenants use tcp",
        ),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words.replace("(", r"\(")):
        settings(**values)


def test_what_a_host_is_known_by() -> None:
    assert settings().peers.host_name == ""
    proven = settings(access={"tls": TLS}, peers={**HOSTS, "certificate_name": "hosts.svc"}, tenants=ACME)
    assert proven.peers.host_name == "hosts.svc"
    assert settings(peers={}).peers.host_name is None
