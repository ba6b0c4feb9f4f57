"""From what was proven to who it is; and what settings contradict themselves."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvtier.appliance.config import Access as AccessSettings
from kvtier.appliance.config import Settings, Tenant
from kvtier.appliance.errors import ApplianceError, StartError
from kvtier.appliance.security.callers import Caller, domain_in
from kvtier.appliance.security.principals import COMMON, Authenticator, Principal, covers
from kvtier.appliance.security.tls import names_of
from kvtier.appliance.security.tokens import PREFIX, hash_of, make_token, parse
from kvtier.tiers.block import Urgency

DAEMON_UID = 990


def access_of(tenants: dict[str, Any], **access: Any) -> Authenticator:
    parsed = {name: Tenant.model_validate(tenant) for name, tenant in tenants.items()}
    return Authenticator(AccessSettings.model_validate(access), parsed, own_uid=DAEMON_UID)


def tenant_of(principal: Principal) -> str | None:
    return None if principal.tenancy is None else principal.tenancy.name


def reason_of(call: Any) -> str:
    with pytest.raises(ApplianceError) as caught:
        call()
    return caught.value.reason


# ------------------------------------------------------------------------------------- Unix sockets


def test_without_tenants_everybody_is_the_common_one_and_the_daemons_user_is_admin() -> None:
    access = access_of({})
    assert access.of_peer(DAEMON_UID, 1) == Principal(f"uid {DAEMON_UID}", COMMON, True)
    assert access.of_peer(0, 0).is_admin
    assert access.of_peer(1000, 1000) == Principal("uid 1000", COMMON, False)
    assert access.of_plain_tcp() == Principal("anonymous", COMMON, False)


def test_a_process_belongs_to_the_tenant_of_its_user_else_of_its_group() -> None:
    access = access_of({"acme": {"members": ["uid:1001", "gid:500"]}, "bolt": {"members": ["uid:1002"]}})
    assert tenant_of(access.of_peer(1001, 7)) == "acme"
    assert tenant_of(access.of_peer(1002, 500)) == "bolt", "the user goes before the group"
    assert tenant_of(access.of_peer(1003, 500)) == "acme"
    assert tenant_of(access.of_peer(1003, 7)) is None
    assert tenant_of(access.of_plain_tcp()) is None
    assert tenant_of(access.of_peer(DAEMON_UID, 7)) is None, "an administrator is no tenant"


def test_named_administrators_replace_root_and_not_the_daemons_user() -> None:
    """Before: `kvtier drain` of the systemd unit, the daemon's user, was refused where any is named."""
    access = access_of({}, admin=["uid:1234", "gid:44"])
    assert access.of_peer(1234, 1).is_admin
    assert access.of_peer(1, 44).is_admin
    assert access.of_peer(DAEMON_UID, 1).is_admin
    assert not access.of_peer(0, 0).is_admin


# ------------------------------------------------------------------------------------- certificates


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("dns:*.acme.svc", "dns:rt.acme.svc", True),
        ("dns:*.acme.svc", "dns:a.b.acme.svc", False),
        ("dns:*.acme.svc", "dns:.acme.svc", False),
        ("dns:*.acme.svc", "dns:rt.acme.svc.evil.example", False),
        ("dns:*.acme.svc", "dns:rtxacme.svc", False),
        ("dns:*.acme.svc", "uri:rt.acme.svc", False),
        ("dns:rt-*.acme.svc", "dns:rt-7.acme.svc", True),
        ("uri:spiffe://c/ns/acme/*", "uri:spiffe://c/ns/acme/rt", True),
        ("uri:spiffe://c/ns/acme/*", "uri:spiffe://c/ns/acme/rt/more", False),
        ("uri:spiffe://c/ns/acme/*", "uri:spiffe://c/ns/acmeevil/rt", False),
    ],
)
def test_a_pattern_stands_for_one_part(pattern: str, name: str, fits: bool) -> None:
    principal = access_of({"acme": {"members": [pattern]}}).of_certificate([name])
    assert (tenant_of(principal) == "acme") == fits


@pytest.mark.parametrize(
    ("identity", "other", "is_covered"),
    [
        ("dns:*.acme.svc", "dns:a.acme.svc", True),
        ("dns:*.acme.svc", "dns:*.acme.svc", True),
        ("dns:*.acme.svc", "dns:a*.acme.svc", True),
        ("dns:*.acme.svc", "dns:a.b.acme.svc", False),
        ("dns:a.acme.svc", "dns:*.acme.svc", False),
        ("uid:1", "uid:1", True),
        ("uid:1", "uid:10", False),
        ("token:a", "token:ab", False),
    ],
)
def test_what_names_no_more_callers_is_covered(identity: str, other: str, is_covered: bool) -> None:
    assert covers(identity, other) == is_covered


def test_a_certificate_of_two_tenants_is_neither() -> None:
    access = access_of(
        {"acme": {"members": ["dns:*.svc"]}, "bolt": {"members": ["dns:b.svc", "dns:c.example"]}}
    )
    assert tenant_of(access.of_certificate(["dns:a.svc"])) == "acme"
    assert tenant_of(access.of_certificate(["dns:b.svc"])) is None
    assert tenant_of(access.of_certificate(["dns:a.svc", "dns:c.example"])) is None
    assert tenant_of(access.of_certificate([])) is None
    assert access.of_certificate(["dns:a.svc"]) == access.of_certificate(["dns:a.svc"])


def test_names_keep_their_type_and_old_tls_is_refused() -> None:
    context = {
        "transport_security_type": [b"ssl"],
        "ssl_tls_version": [b"TLSv1.3"],
        "peer_dns": [b"a.svc"],
        "peer_uri": [b"spiffe://a"],
        "peer_email": [b"b.svc"],
        "x509_common_name": [b"c.svc"],
    }
    assert names_of(context) == ["dns:a.svc", "uri:spiffe://a"]
    assert names_of({"transport_security_type": [b"insecure"]}) is None
    assert reason_of(lambda: names_of(context | {"ssl_tls_version": [b"TLSv1.2"]})) == "NOT_AUTHENTICATED"
    del context["ssl_tls_version"]
    assert reason_of(lambda: names_of(context)) == "NOT_AUTHENTICATED"


# ------------------------------------------------------------------------------------------- tokens


def test_a_token_is_its_tenant_until_the_file_says_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens"
    first, second = make_token(), make_token()
    file.write_text(f"# who\nci {hash_of(first)}\n\nops {hash_of(second)}  # both\n")
    access = access_of({"acme": {"members": ["token:ci"]}}, tokens=str(file), admin=["token:ops"])
    assert first.startswith(PREFIX)
    assert tenant_of(access.of_token(first)) == "acme"
    assert access.of_token(second) == Principal("token ops", None, True)
    for wrong in ("", "ci", hash_of(first), first[:-1], first + "x", "\udcff", make_token()):
        assert reason_of(lambda wrong=wrong: access.of_token(wrong)) == "NOT_AUTHENTICATED"
    third = make_token()
    assert access.tokens is not None
    file.write_text(f"ci {hash_of(third)}\n")
    access.tokens.read_again()
    assert tenant_of(access.of_token(third)) == "acme"
    assert reason_of(lambda: access.of_token(first)) == "NOT_AUTHENTICATED"
    file.write_text("ci is a secret word\n")
    access.tokens.read_again()
    assert tenant_of(access.of_token(third)) == "acme", "what was read before still holds"
    assert "line 1: write a name" in caplog.text
    assert third not in caplog.text


def test_without_a_file_no_token_is_known() -> None:
    assert reason_of(lambda: access_of({}).of_token(make_token())) == "NOT_AUTHENTICATED"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ci", "line 1: write a name"),
        ("\nci 12", "line 2: write a name"),
        (f"ci {'0' * 64}\nci {'1' * 64}", "line 2: ci has a token already"),
        (f"A/b {'0' * 64}", "line 1: 'A/b' is no name"),
    ],
)
def test_a_wrong_token_file_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(StartError, match=r"access\.tokens"):
        access_of({}, tokens=str(file))


# ------------------------------------------------------------------------------- domains, sessions


def test_domains_of_different_tenants_never_meet() -> None:
    """Over all ways to share, all names, and all that a connection may ask for within its own."""
    tenants = {
        "acme": {"members": ["uid:1"]},
        "acme.eu": {"members": ["uid:2"]},
        "red-1": {"members": ["uid:3"], "sharing": "group:red"},
        "red-2": {"members": ["uid:4"], "sharing": "group:red"},
        "red": {"members": ["uid:5"]},
        "open-1": {"members": ["uid:6"], "sharing": "public"},
        "open-2": {"members": ["uid:7"], "sharing": "public"},
        "public": {"members": ["uid:8"]},
        "old": {"members": ["uid:9"], "sharing": "all"},
    }
    access = access_of(tenants)
    may_meet = [{"red-1", "red-2"}, {"open-1", "open-2"}]
    wanted = ["", "acme", "eu", "red", "red-1", "public", "a/b", "/", "acme/eu"]
    owner: dict[str, set[str]] = {}
    for uid in range(1, 10):
        tenancy = access.of_peer(uid, 0).tenancy
        assert tenancy is not None
        for name in wanted:
            owner.setdefault(domain_in(tenancy, name), set()).add(tenancy.name)
        for forged in ("tenant:acme", "group:red", "public:", ":"):
            assert reason_of(lambda t=tenancy, f=forged: domain_in(t, f)) == "BAD_REQUEST"
    assert all(len(names) == 1 or names in may_meet for names in owner.values())
    assert sum(len(names) > 1 for names in owner.values()) == 2 * len(wanted), "those that share do meet"


def test_sessions_of_one_name_are_two_and_nobody_can_forge_the_other() -> None:
    access = access_of({"acme": {"members": ["uid:1"]}, "bolt": {"members": ["uid:2"]}})
    acme, bolt = (Caller(principal=access.of_peer(uid, 0)) for uid in (1, 2))
    common = Caller(principal=Principal("uid 3", COMMON))
    names = {caller.known_session("session_id", "s") for caller in (acme, bolt, common)}
    assert len(names) == 3
    assert acme.session("session_id", "") == ""
    for forged in ("acme\ts", "a\x00b", "a\nb", "a\u2028b"):
        assert reason_of(lambda forged=forged: common.session("session_id", forged)) == "BAD_REQUEST"
    assert reason_of(lambda: acme.known_session("session_id", "")) == "BAD_REQUEST"
    assert reason_of(lambda: Caller().session("session_id", "s")) == "NO_TENANT", (
        "a caller is nobody by default"
    )


def test_nobody_is_more_urgent_than_its_tenant_may_be() -> None:
    access = access_of(
        {"batch": {"members": ["uid:1"], "most_urgent": "queued"}, "chat": {"members": ["uid:2"]}}
    )
    batch, chat = (Caller(principal=access.of_peer(uid, 0)) for uid in (1, 2))
    wire = {urgency: urgency + 1 for urgency in Urgency}
    assert batch.urgency(wire[Urgency.DECODING]) is Urgency.QUEUED
    assert batch.urgency(wire[Urgency.IDLE]) is Urgency.IDLE
    assert chat.urgency(wire[Urgency.DECODING]) is Urgency.DECODING


# ----------------------------------------------------------------------------------------- settings

MEMORY = {"tiers": {"dram": {"capacity": "8MiB", "extent": "2MiB"}}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "TCP without TLS": ({"listen": ["0.0.0.0:5000"]}, "needs access.tls"),
    "TLS without authority and tokens": (
        {"access": {"tls": {"certificate": "/a", "key": "/b"}}},
        "give access.tokens, or client_ca",
    ),
    "one user, two tenants": (
        {"tenants": {"a": {"members": ["uid:1"]}, "b": {"members": ["uid:1"]}}},
        "uid:1 belongs to a and",
    ),
    "nobody's tenant": ({"tenants": {"a": {"members": []}}}, "at least 1 item"),
    "a name with a separator": ({"tenants": {"a/b": {"members": ["uid:1"]}}}, "is no name"),
    "a group nobody named": ({"tenants": {"a": {"members": ["uid:1"], "sharing": "group"}}}, "group:NAME"),
    "a group of no name": ({"tenants": {"a": {"members": ["uid:1"], "sharing": "group:A b"}}}, "is no name"),
    "an id that is none": ({"tenants": {"a": {"members": ["uid:4294967296"]}}}, "largest id is 4294967295"),
    "a name of no type": ({"tenants": {"a": {"members": ["a.svc"]}}}, "dns:NAME"),
    "tokens without a file": ({"tenants": {"a": {"members": ["token:t"]}}}, "names no file"),
    "bytes of what is shared": (
        {"tenants": {"a": {"members": ["uid:1"], "sharing": "public", "quota": {"dram": "1GiB"}}}},
        "count for no single tenant",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_contradicts_itself_is_refused_with_the_fix(what: str) -> None:
    section, message = REFUSED[what]
    with pytest.raises(ValidationError, match=message):
        Settings.model_validate({"listen": ["unix:///tmp/k.sock"], **MEMORY, **section})


def test_plain_tcp_must_be_spelled_out() -> None:
    settings = Settings.model_validate({"listen": ["0.0.0.0:5000"], **MEMORY, "access": {"insecure": True}})
    assert settings.socket_mode == 0o660
    with_tenants = Settings.model_validate(
        {"listen": ["unix:///tmp/k.sock"], **MEMORY, "tenants": {"a": {"members": ["uid:1"]}}}
    )
    assert with_tenants.socket_mode == 0o666, "tenants run as other users; the kernel says who they are"


def test_a_stranger_is_of_no_tenant_no_administrator_not_root_and_not_the_daemons_user() -> None:
    tenants = {"acme": {"members": ["uid:1001", "gid:500"]}}
    access = access_of(tenants, admin=["uid:1234"])
    assert access.is_stranger(1003, 7)
    members = ((1001, 7), (1003, 500), (1234, 7), (0, 0), (DAEMON_UID, 7))
    assert not any(access.is_stranger(uid, gid) for uid, gid in members)
    assert not access_of({}).is_stranger(1003, 7), "without tenants all are of the common one"


def test_where_tokens_are_taken_no_user_is_a_stranger(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"ops {hash_of(make_token())}\n")
    access = access_of({"acme": {"members": ["token:ops"]}}, tokens=str(tmp_path / "tokens"))
    assert access.is_stranger(1003, 7)
    assert not access.is_stranger(1003, 7, may_have_token=True)
