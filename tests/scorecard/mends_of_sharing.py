"""Mends 11 and 12: what one tenant or host could take of stores, hosts and memory that many share."""

from .mend import Mend

_EXPORTS = "tests/appliance/core/capacity/test_exports_of_tenants.py::"
_ARCHIVING = "tests/appliance/core/capacity/test_archiving.py::"
_SOURCES = "tests/appliance/core/requests/test_sources_of_tenants.py::"
_MEMORY = "tests/appliance/fleet/test_memory_of_tenants.py::"
_SEARCHES = "tests/appliance/transfer/test_searches.py::"
_SPEED = "tests/appliance/core/copying/test_source_speed.py::"
_PREFETCH = "tests/appliance/core/promotion/test_prefetch.py::"
_HOSTILE = "tests/appliance/fleet/test_hostile_host.py::"

SHARING = [
    Mend(
        "11a",
        "retention that a tenant states, or a user by `kv_hints`",
        "{retained_beside:.0f} of 6 blocks of another tenant stay below the watermark, its half of what "
        "there may be",
        (
            "tests/appliance/core/requests/test_shares_of_tenants.py::"
            "test_what_a_tenant_says_of_retention_costs_no_other_one_its_part_of_memory",
        ),
        "appliance/core/capacity/victims.py",
        (("self._crowding(tier) if self._core.catalog.retained else None", "None"),),
    ),
    Mend(
        "11b",
        "rankings that one tenant asks for, beside 64 hosts",
        "go on one at a time; of 200 at once those beyond 64 are refused",
        ("tests/e2e/test_rank.py::test_rankings_of_one_tenant_go_on_one_at_a_time",),
        "appliance/fleet/rank_service.py",
        (
            ("        async with lane.turn:\n", "        if True:\n"),
            ("if lane.num >= MAX_WAITING:", "if False:"),
        ),
    ),
    Mend(
        "11c",
        "streams of block events of one tenant",
        "are {watches_of_a_tenant:.0f} of 8 (in a daemon 32 of 64)",
        ("tests/security/test_watch.py::test_streams_of_one_tenant_leave_others_theirs",),
        "appliance/server/grpc_server.py",
        (("self._watches = Shares(MAX_WATCHES)", "self._watches = Shares(1 << 20)"),),
    ),
    Mend(
        "11d",
        "connections to the data port of a host, without a ticket",
        "the oldest of the address that has the most is closed",
        (
            "tests/appliance/fleet/test_hostile_fetcher.py::"
            "test_strangers_of_one_address_take_no_place_of_another",
        ),
        "appliance/fleet/data_listener.py",
        (("if known == address)", "if True)"),),
    ),
    Mend(
        "11e",
        "a host that names half a million blocks in one message",
        "more than 20,480 names end its stream; reading pauses for five times what a message takes",
        (_HOSTILE + "test_more_names_than_a_host_sends_at_once_end_its_stream",),
        "appliance/fleet/hosts.py",
        (("    if num_names > MAX_NAMES_AT_ONCE:\n", "    if False:\n"),),
    ),
    Mend(
        "11g",
        "exports of one tenant into a store that hosts share",
        "leave the part of the budget that is reserved for another tenant",
        (_EXPORTS + "test_one_tenant_does_not_use_up_the_budget_of_all",),
        "appliance/core/capacity/exports.py",
        (
            (
                "WriteBudget(core.options.daily_export_bytes, core.options.num_tenants)",
                "WriteBudget(core.options.daily_export_bytes)",
            ),
        ),
    ),
    Mend(
        "11h",
        "bundles of one tenant that wait for their export",
        "tenants take turns, and each has its share of the places",
        (
            _EXPORTS + "test_tenants_take_turns",
            _EXPORTS + "test_bundles_of_one_tenant_that_wait_leave_the_others_their_places",
        ),
        "appliance/core/turns.py",
        (
            (
                "        if queue:\n            self._waiting[tenant] = queue\n",
                "        if queue:\n            self._waiting[tenant] = queue\n"
                "            self._waiting.move_to_end(tenant, last=False)\n",
            ),
        ),
    ),
    Mend(
        "11i",
        "lookups of one tenant in a store that hosts share",
        "128 of 1,000 are searches under way",
        (_SOURCES + "test_searches_of_one_tenant_leave_the_others_their_share",),
        "appliance/core/requests/searches.py",
        (("Shares(MAX_SEARCHES, core.options.num_tenants)", "Shares(1 << 20, core.options.num_tenants)"),),
    ),
    Mend(
        "11j",
        "searches of one tenant that are queued for the store",
        "another tenant's fetch lands before the twentieth of 300",
        (
            _SEARCHES + "test_a_fetch_waits_for_few_of_the_searches_of_another_tenant",
            _SEARCHES + "test_searches_and_fetches_alternate",
        ),
        "appliance/transfer/object_edge.py",
        (
            ("self._queues[type(work)].add(_tenant(work), work)", 'self._queues[type(work)].add("", work)'),
            (
                "                self._order = (FetchBundle if kind",
                "                _ = (FetchBundle if kind",
            ),
        ),
    ),
    Mend(
        "11k",
        "fetches of one tenant with a deadline of 2 ms",
        "say nothing about the speed of the store",
        (_SPEED + "test_callers_with_little_time_do_not_make_it_slow",),
        "appliance/core/copying/source_speed.py",
        ((" or not begun.tells:", ":"),),
    ),
    Mend(
        "11l",
        "fetches of one tenant from another host with a deadline of 4 ms",
        "late ones of less than 0.25 s say nothing about the host",
        (_HOSTILE + "test_callers_with_little_time_do_not_make_a_host_silent",),
        "appliance/fleet/peer_edge.py",
        (("TELLING_S: Final = 0.25", "TELLING_S: Final = 0.0"),),
    ),
    Mend(
        "11m",
        "a prompt of one tenant of 256 bundles that the store has",
        "another tenant's blocks come in twice the time that they take alone: tenants take turns",
        (
            _SOURCES + "test_what_one_tenant_fetches_leaves_another_its_part_of_the_source",
            _SPEED + "test_what_others_have_on_their_way_counts_as_far_as_it_goes_before_a_fetch",
        ),
        "appliance/core/copying/source_speed.py",
        (("min(held, own) for other", "held for other"),),
    ),
    Mend(
        "11n",
        "fetches of one tenant that wait to begin, here and at another host",
        "another tenant's begins after one of them",
        (
            _SOURCES + "test_tenants_take_turns_in_beginning_to_fetch",
            "tests/appliance/fleet/test_fetch_turns.py::test_a_fetch_waits_for_one_of_another_tenant_at_most",
        ),
        "appliance/core/turns.py",
        (
            ("        self._waiting.move_to_end(next(iter(self._waiting)))\n", "        pass\n"),
            (
                "        if queue:\n            self._waiting[tenant] = queue\n",
                "        if queue:\n            self._waiting[tenant] = queue\n"
                "            self._waiting.move_to_end(tenant, last=False)\n",
            ),
        ),
    ),
    Mend(
        "12a",
        "one EndSession with archive at a full quota of nvme",
        "is looked at 4,096 blocks a step",
        (_ARCHIVING + "test_a_long_chain_at_a_full_quota_is_looked_at_in_parts",),
        "appliance/core/capacity/cold_quota.py",
        (("MAX_VISITS = 4096", "MAX_VISITS = 1 << 40"),),
    ),
    Mend(
        "12b",
        "blocks of one tenant's ended sessions that wait for the cold store",
        "tenants take turns, a block waits once, and each tenant has its share of the places",
        (
            _ARCHIVING + "test_tenants_take_turns",
            _ARCHIVING + "test_blocks_of_one_tenant_that_wait_leave_the_others_their_places",
        ),
        "appliance/core/capacity/archiving.py",
        (
            ("            self._turns.move_to_end(tenant)\n", ""),
            ("if not self._shares.may_take(tenant, len(handles)):", "if False:"),
        ),
    ),
    Mend(
        "12c",
        "returns of one tenant's sessions that are announced and do not happen",
        "all 870 blocks come up that another tenant announces rightly",
        (
            _PREFETCH + "test_wrong_announcements_of_one_tenant_are_not_counted_against_another",
            _PREFETCH + "test_announced_blocks_of_one_tenant_leave_another_its_share_of_memory",
        ),
        "appliance/core/promotion/prefetch.py",
        (
            ("account = self._account(source, tenant)", 'account = self._account(source, "")'),
            (" or not self._shares.may_take(tenant, num_bytes):", ":"),
        ),
    ),
    Mend(
        "12d",
        "names of bundles that one tenant asks for",
        "the tenant that has the most forgets its oldest",
        (_SOURCES + "test_names_that_one_tenant_asks_for_do_not_make_those_of_others_forgotten",),
        "appliance/core/copying/source_index.py",
        (('return tenant_of(namespace.identity.domain) if namespace is not None else ""', 'return ""'),),
    ),
    Mend(
        "12e",
        "lookups of one tenant in an index of what hosts hold",
        "are 8 of the 16 at a time",
        (_MEMORY + "test_looks_of_one_tenant_leave_others_theirs",),
        "appliance/fleet/index.py",
        (("not self._shares.take(part.tenant, 1):", 'not self._shares.take("", 1):'),),
    ),
    Mend(
        "12f",
        "65,536 blocks of one tenant that hosts tell of, that are ranked, or that a store lacks",
        "the tenant that has the most forgets its oldest",
        (
            _MEMORY + "test_what_hosts_tell_of_one_tenants_chains_leaves_those_of_others",
            _MEMORY + "test_prompts_that_one_tenant_has_ranked_do_not_make_those_of_others_forgotten",
            _MEMORY + "test_answers_for_one_tenant_do_not_make_those_for_others_forgotten",
            _MEMORY + "test_what_a_store_lacks_of_one_tenant_does_not_make_that_of_others_forgotten",
        ),
        "appliance/core/remembered.py",
        (
            (
                "        known = self._of_tenant[tenant]\n",
                "        known = next(iter(self._of_tenant.values()))\n",
            ),
        ),
    ),
    Mend(
        "12g",
        "a drain of a daemon that holds many blocks",
        "looks at 128 blocks in a step of the event loop",
        ("tests/appliance/core/requests/test_keeping.py::test_a_drain_looks_at_few_blocks_in_a_step",),
        "appliance/core/capacity/archiving.py",
        (("        while row < end and num_left:\n", "        while row < end:\n"),),
    ),
]
