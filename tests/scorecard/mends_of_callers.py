"""Mends 1 to 5: overload, and what one caller or tenant could take of all."""

from .mend import Mend

_OVERLOAD = "tests/e2e/test_overload.py::"
_PUTS = "tests/e2e/test_unfinished_puts.py::"
_ADMISSION = "tests/appliance/server/test_admission.py::"
_SHARES = "tests/appliance/core/requests/test_shares_of_tenants.py::"
_REQUESTS = "tests/appliance/core/requests/"

CALLERS = [
    Mend(
        "1a",
        "more calls over gRPC than can be answered",
        "p99 {p99_1x_ms:.1f} ms at the usual load, {p99_10x_ms:.1f} at ten times that; {cancelled:.0f} "
        "cancelled without a reason; admits all {recovery_ms:.0f} ms after the load",
        (
            _ADMISSION + "test_under_overload_a_refusal_says_when_to_come_back",
            _ADMISSION + "test_a_burst_is_admitted",
        ),
        "appliance/server/admission.py",
        (
            ("        self._sheds_until = now_ns + CALM_NS\n        return True", "        return False"),
            ("now_ns - late_since < BURST_NS", "now_ns < late_since"),
        ),
    ),
    Mend(
        "1b",
        "a refused call",
        "refused within {refused_p99_ms:.1f} ms (p99), with `retry_after_ms`, `RetryInfo` and gRPC's "
        "pushback",
        (_OVERLOAD + "test_a_refusal_has_a_reason_and_says_when_to_come_back",),
        "appliance/server/admission.py",
        (("retry_after_s=(at_ns - now_ns) / 1e9", "retry_after_s=0.0"),),
    ),
    Mend(
        "1c",
        "calls that cannot be answered by their deadline",
        "refused at once",
        (_ADMISSION + "test_a_call_that_cannot_meet_its_deadline_is_refused_though_it_has_its_turn",),
        "appliance/server/admission.py",
        (("if now_ns + self.service_ns > deadline_ns:", "if False:"),),
    ),
    Mend(
        "1d",
        "other callers while one floods",
        "{answered_beside_a_flood:.0f} of 41 calls of others, health checks and an administrator answered",
        (_OVERLOAD + "test_others_are_answered_while_one_floods",),
        "appliance/server/admission.py",
        (("        if lane in self._served:\n", "        if self._served:\n"),),
    ),
    Mend(
        "1e",
        "memory under overload",
        "at most {highest_mib:.0f} MiB",
        ("tests/appliance/server/test_grpc_options.py::test_calls_and_connections_are_bounded",),
        "appliance/server/grpc_server.py",
        (
            ('    "grpc.server.max_pending_requests_hard_limit": 4096,\n', ""),
            ('    "grpc.max_concurrent_streams": MAX_CALLS_OF_CONNECTION,\n', ""),
        ),
    ),
    Mend(
        "2a",
        "streams of health and reflection of one user",
        "{health_streams:.0f} of 300 are open; calls, health checks and the administrator are answered",
        (_OVERLOAD + "test_streams_of_health_leave_room_for_calls",),
        "appliance/server/grpc_server.py",
        (("self._open_streams = Shares(MAX_OPEN_STREAMS)", "self._open_streams = Shares(1 << 20)"),),
    ),
    Mend(
        "2b",
        "streams of one caller",
        "has {streams_of_a_caller:.0f} of 8 calls in progress (in a daemon 256 of 512)",
        (_OVERLOAD + "test_a_caller_has_its_share_of_streams",),
        "appliance/server/grpc_server.py",
        (("self._calls = Shares(MAX_CALLS)", "self._calls = Shares(1 << 20)"),),
    ),
    Mend(
        "2c",
        "users of no tenant at the local socket",
        "have {strangers_at_the_local_socket:.0f} connections together; others are told `NO_TENANT` and "
        "closed",
        (_OVERLOAD + "test_a_stranger_at_the_local_socket_is_told_so_and_closed",),
        "appliance/server/local_server.py",
        (("if is_stranger and len(self._strangers) >= MAX_STRANGERS:", "if False:"),),
    ),
    Mend(
        "2d",
        "users of no tenant at the gRPC socket",
        "have {strangers_at_the_grpc_socket:.0f} connections together; each call is told `NO_TENANT`",
        (_OVERLOAD + "test_a_stranger_at_the_grpc_socket_has_few_connections",),
        "appliance/server/peer_credential_proxy.py",
        (("if is_stranger and self._num_strangers >= MAX_STRANGERS:", "if False:"),),
    ),
    Mend(
        "3a",
        "a put over gRPC that is announced, and no more",
        "takes {announced_put_bytes:.0f} bytes; another put of all there is is stored meanwhile",
        (_PUTS + "test_an_announced_put_takes_no_space_before_its_bytes",),
        "appliance/server/streams.py",
        (
            (
                "        return number << _ADDRESS_BITS\n",
                "        self.fill(number << _ADDRESS_BITS, num_bytes)\n"
                "        return number << _ADDRESS_BITS\n",
            ),
        ),
    ),
    Mend(
        "3b",
        "puts without a header",
        "{puts_without_a_header:.0f} of 3 are taken (in a daemon 192, of a tenant half); other calls are "
        "answered",
        (
            _PUTS + "test_puts_without_a_header_leave_calls_for_others",
            _PUTS + "test_a_tenant_may_make_half_of_the_calls",
        ),
        "appliance/server/streams.py",
        (("self.calls = Shares(MAX_STREAM_PUTS)", "self.calls = Shares(1 << 20)"),),
    ),
    Mend(
        "3c",
        "a put that falls silent, and one of a client that is gone",
        "ends after 30 s ({silent_put_s:.2f} s after 0.05 s, in the test), or with its client",
        (_PUTS + "test_a_silent_put_ends", _PUTS + "test_a_put_ends_with_its_client"),
        "appliance/server/streams.py",
        (
            ("async with asyncio.timeout(IDLE_S) as silence:", "async with asyncio.timeout(1e9) as silence:"),
            ("client.receiving.add(silence)", "pass"),
        ),
    ),
    Mend(
        "3d",
        "buffers of one tenant's puts",
        "are half of all; a larger put is `TOO_LARGE`",
        (_PUTS + "test_a_tenant_may_fill_half_of_the_buffers",),
        "appliance/server/streams.py",
        (("limit = self._shares.largest(tenant)", "limit = self._shares.capacity"),),
    ),
    Mend(
        "4a",
        "namespaces of one tenant",
        "are {namespaces_of_a_tenant:.0f} of 16 where two tenants share them; the other has the rest",
        (_REQUESTS + "test_namespaces.py::test_one_tenant_does_not_take_all_namespaces",),
        "appliance/core/requests/request_registry.py",
        (("        if shares.may_take(tenant, 1):\n", "        if shares.taken < shares.capacity:\n"),),
    ),
    Mend(
        "4b",
        "isolation domains of one tenant",
        "are {domains_of_a_tenant:.0f} of 8; of 20 that were used and left at most {domains_left:.0f} remain",
        (
            "tests/security/test_open_domains.py::test_domains_of_one_tenant_leave_the_others_their_share",
            "tests/security/test_open_domains.py::test_an_unused_domain_is_given_back",
        ),
        "appliance/server/open_domains.py",
        (
            ("self._shares.resize(MAX_DOMAINS, self._service.options.num_tenants)", "pass"),
            ("            self._give_back_unused()\n", "            pass\n"),
        ),
    ),
    Mend(
        "4c",
        "many pins on one block",
        "{pins_on_one_block:.0f} of them count as one; of 40 blocks of pins a tenant has {pinned_blocks:.0f}",
        (
            _SHARES + "test_many_pins_on_one_block_do_not_use_up_the_bytes_of_others",
            _SHARES + "test_pins_of_one_tenant_leave_the_others_their_share",
        ),
        "appliance/core/requests/pins.py",
        (
            ("if self._num_pins[key] == max(0, number):", "if number > 0 or not self._num_pins[key]:"),
            (
                "if not self._blocks.may_take(tenant, max(1, len(rows))):",
                "if self._blocks.taken >= self._blocks.capacity:",
            ),
        ),
    ),
    Mend(
        "4d",
        "local connections of one tenant",
        "are {clients_of_a_tenant:.0f} of 8; closed once refused, or 5 s without an attach",
        (
            "tests/security/test_shares.py::test_clients_of_one_tenant_leave_the_others_their_share",
            "tests/appliance/server/test_local_server.py::"
            "test_a_connection_whose_attach_was_refused_is_closed",
        ),
        "appliance/security/client_registry.py",
        (
            (
                "            self.expire()\n        if not self._shares.may_take(tenant, 1):\n",
                "            self.expire()\n        if self._shares.taken >= self._shares.capacity:\n",
            ),
        ),
    ),
    Mend(
        "4e",
        "staging of one tenant",
        "is {staging_mib:.0f} MiB with a quota of 6 MiB in 8 MiB of dram",
        ("tests/security/test_shares.py::test_staging_of_a_tenant_is_at_most_its_quota_of_dram",),
        "appliance/server/local_server.py",
        (
            (
                "if not options.num_tenants or (fits and shares.may_take(tenant, num_bytes)):",
                "if True:",
            ),
        ),
    ),
    Mend(
        "4f",
        "new sessions of one tenant",
        "after 100 of them {sessions_of_others:.0f} of 4 of the other are there; ended ones are given back",
        (
            _SHARES + "test_sessions_of_one_tenant_do_not_make_others_forgotten",
            _SHARES + "test_sessions_that_ended_leave_their_share_to_new_ones",
        ),
        "appliance/core/requests/sessions.py",
        (
            (
                "orders.get((tenant, False)) or orders.get((tenant, True))\n        if not order:\n"
                "            of_most",
                "min((one for one in orders.values() if one), key=lambda one: next(iter(one.values()))"
                ".last_active)\n        if not order:\n            of_most",
            ),
            ("        self._shares.give(session.tenant, 1)\n", ""),
        ),
    ),
    Mend(
        "5",
        "`/healthz` beside half-open requests",
        "{probes_answered:.0f} of 32 probes answered beside 128 half requests from 8 addresses",
        (
            "tests/appliance/observability/test_web.py::test_half_requests_of_many_peers_do_not_stop_a_probe",
            "tests/appliance/observability/test_web.py::test_a_peer_takes_the_places_of_its_own_connections",
            "tests/appliance/observability/test_web.py::test_answers_that_last_leave_a_reserve_for_probes",
        ),
        "appliance/observability/http_connections.py",
        (
            ("            self._close(next(iter(self._waiting)))\n", "            connection.cancel()\n"),
            ("if self._num_of(peer) >= MAX_CONNECTIONS_PER_PEER:", "if False:"),
            ("_count(self._answering, peer) >= MAX_ANSWERS_PER_PEER", "False"),
        ),
    ),
]
