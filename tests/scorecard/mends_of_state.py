"""Mends 6 to 11: ids, hostile daemons and files, what earlier work had left, and newer surfaces."""

from .mend import Mend

_OVERLOAD = "tests/e2e/test_overload.py::"
_FILES = "tests/e2e/test_administrators_files.py::"
_LIES = "tests/clients/links/test_hostile_daemon.py::"
_REQUESTS = "tests/appliance/core/requests/"

STATE = [
    Mend(
        "6",
        "ids of leases, pins, reservations, namespaces and clients",
        "counters of all tenants together",
        "of 64 before and 64 after {ids_between:,.0f} of another tenant every bit is set in half, and "
        "changes in half",
        ("tests/security/test_ids.py",),
        "appliance/core/secret_ids.py",
        (
            (
                "            number = ready.pop() >> 1\n",
                "            self._n = getattr(self, '_n', 0) + 1\n            number = self._n\n",
            ),
        ),
    ),
    Mend(
        "7a",
        "an answer that names blocks and has no fragments",
        "reported as loaded, though never written",
        "{blocks_of_a_lie:.0f} of 3 blocks reported",
        (
            _LIES + "test_blocks_without_fragments_are_no_blocks",
            _LIES + "test_a_block_lacks_one_of_its_fragments",
        ),
        "clients/operations/answers.py",
        (("        return min(self._first_block + num_whole, num_blocks)\n", "        return num_blocks\n"),),
    ),
    Mend(
        "7b",
        "a daemon with malformed answers",
        "DecodeError, KeyError, IndexError, ValueError in the runtime",
        "{calls_of_mutations:.0f} calls over two transports, only KvtierError left; each lie closes the link",
        (_LIES + "test_only_kvtier_errors_leave", _LIES + "test_a_lie_ends_the_connection"),
        "clients/operations/answers.py",
        (
            ("    if num_blocks > limit:\n", "    if False:\n"),
            ("    if len(packed) != num_blocks:\n", "    if False:\n"),
        ),
    ),
    Mend(
        "7c",
        "a flood of frames that no call awaits",
        "a deadline of 1 s ends after 6.4 s",
        "one of 0.2 s after {flood_s:.2f} s",
        (_LIES + "test_a_flood_of_late_answers_does_not_outlast_a_deadline",),
        "clients/links/link.py",
        (("if num_late_reads > _MAX_LATE_READS or now - late_since > _MAX_LATE_S:", "if False:"),),
    ),
    Mend(
        "8a",
        "a pipe in place of the policy file",
        "hangs the watcher; SIGTERM does not end the process",
        "refused in words; SIGTERM ends it in {stop_with_a_pipe_s:.1f} s",
        (
            _FILES + "test_what_is_no_file_of_its_size_is_refused",
            _FILES + "test_a_pipe_in_place_of_the_policy_is_refused_and_the_daemon_ends",
        ),
        "proto/kvtier/v1/files.py",
        (("if not stat.S_ISREG(os.fstat(descriptor).st_mode):", "if False:"),),
    ),
    Mend(
        "8b",
        "a policy file on a network that hangs",
        "the process does not end",
        "ends in {stop_while_hanging_s:.1f} s, while the read hangs",
        (
            _FILES + "test_a_policy_file_that_hangs_does_not_hold_up_the_end",
            _FILES + "test_a_read_that_hangs_does_not_hold_up_the_end_of_the_process",
        ),
        "appliance/detached.py",
        (("name=name, daemon=True", "name=name, daemon=False"),),
    ),
    Mend(
        "8c",
        "`keys.json` of 100,000 brackets",
        "RecursionError",
        "refused as damaged",
        ("tests/tiers/encryption/test_tenant_keys.py::test_a_damaged_key_file_is_refused",),
        "tiers/encryption/keyring.py",
        (("AttributeError, RecursionError) as error", "AttributeError) as error"),),
    ),
    Mend(
        "8d",
        "clients that connect at once",
        "of 80, 34 are told NO_ANSWER and 2 NOT_RUNNING",
        "{connected_at_once:.0f} of 300 wait in the queue of each socket, and are served",
        (_OVERLOAD + "test_connections_that_come_together_wait",),
        "appliance/server/unix_listener.py",
        (("BACKLOG = 4096", "BACKLOG = 128"),),
    ),
    Mend(
        "9a",
        "a pin of a block that never reached its floor",
        "does not protect it below",
        "kept in the tier that it is in until the pin ends",
        (
            _REQUESTS + "test_keeping.py::"
            "test_a_pinned_block_that_never_reached_its_floor_is_kept_below_until_the_pin_ends",
            _REQUESTS
            + "test_keeping.py::test_a_pinned_block_that_never_reached_its_floor_goes_down_and_no_further",
        ),
        "appliance/core/catalog/rules.py",
        (
            (
                "others = self._tiers if tier > floor else self._tiers[: floor + 1]",
                "if tier > floor:\n            return True\n        others = self._tiers[: floor + 1]",
            ),
        ),
    ),
    Mend(
        "9b",
        "an nvme of a few segments full of what must stay",
        "seeds 136174, 141348, 407886, 510122 and 1061 of the simulator fail",
        "{small_stores_passed:.0f} of 5 pass, verified and not",
        (
            "tests/sim/test_sim.py::test_an_nvme_of_few_segments_full_of_what_must_stay",
            "tests/appliance/core/catalog/test_half_blocks.py::"
            "test_half_a_block_that_memory_has_is_not_copied_forward",
        ),
        "appliance/core/catalog/rules.py",
        (
            (
                "            and self.is_elsewhere(row, tier)\n        )\n\n    def is_below",
                "            and False\n        )\n\n    def is_below",
            ),
        ),
    ),
    Mend(
        "9c",
        "`max_namespaces`",
        "counts what was ever stored",
        "{namespaces_after_a_start:.0f} of 100 stored without records count after a start",
        (_REQUESTS + "test_namespaces.py::test_a_start_forgets_namespaces_without_records",),
        "appliance/core/planner.py",
        (("            self.requests.forget(namespace)\n", "            pass\n"),),
    ),
    Mend(
        "9d",
        "an administrator's own learner in `shared` that raises",
        "ends the daemon",
        "told nothing more; policies go on",
        (
            "tests/policies/test_guarded.py::test_a_learner_that_fails_is_told_nothing_more_and_its_policy_goes_on",
        ),
        "policies/guarded.py",
        (
            (
                "                forward()\n            except (Exception, SystemExit) as error:\n"
                "                self._trouble.note(error)\n",
                "                forward()\n            finally:\n                pass\n",
            ),
        ),
    ),
    Mend(
        "9e",
        "a LoRA folder rewritten under a running engine",
        "the new name, the old weights' KV",
        "a miss, and nothing is saved, until the adapter is loaded anew",
        (
            "tests/vllm/unit/test_agent.py::"
            "test_a_folder_rewritten_under_a_loaded_adapter_is_a_miss_until_it_is_loaded_anew",
        ),
        "clients/vllm/scheduler/agent.py",
        (("first = self._adapters.setdefault((question.adapter_id, path), digest)", "first = digest"),),
    ),
    Mend(
        "9f",
        "`evict` of many blocks",
        "one step",
        "at most {evicted_in_a_step:.0f} of 19 blocks in a step of 4",
        (_REQUESTS + "test_evicting.py::test_much_is_evicted_in_steps",),
        "appliance/core/requests/evicting.py",
        (
            (
                "        for _ in range(STEP_BLOCKS):\n            if not stack:",
                "        for _ in range(1 << 30):\n            if not stack:",
            ),
        ),
    ),
    Mend(
        "9g",
        "erasing a large tenant",
        "one step",
        "at most {erased_in_a_step:,.0f} of {erased_blocks:,.0f} blocks in a step",
        (_REQUESTS + "test_erasing.py::test_a_large_tenant_goes_in_steps",),
        "appliance/core/requests/erasing.py",
        (("list(islice(job.handles, STEP_BLOCKS))", "list(job.handles)"),),
    ),
    Mend(
        "9h",
        "a cold store too small for what must stay",
        "writes a segment anew once a second",
        "{segments_in_vain:.0f} in 600 s",
        (
            "tests/appliance/core/copying/test_refusals.py::"
            "test_a_store_too_small_for_what_must_stay_is_tried_ever_more_rarely",
        ),
        "appliance/core/capacity/reclaim.py",
        (("self._pause_s = min(2 * self._pause_s, MAX_FRUITLESS_PAUSE_S)", "pass"),),
    ),
    Mend(
        "9i",
        "an append to the manifest that fails",
        "nvme is offline until a restart",
        "repeated: nvme is back after {failed_appends:.0f} failures, with the first success",
        (
            "tests/appliance/test_appliance.py::test_a_store_that_failed_is_asked_again_and_comes_back",
            "tests/tiers/cold/test_manifest.py::test_after_a_failure_the_next_event_goes_to_a_new_file",
        ),
        "appliance/store_tasks.py",
        (("                self._loop.call_later(delay_s, begin)\n", "                pass\n"),),
    ),
    Mend(
        "9j",
        "what rots at rest",
        "found when it is read, or never",
        "{rot_found:.0f} of 6 damaged fragments found in the background",
        ("tests/e2e/test_verify.py::test_the_background_finds_it_without_being_asked",),
        "appliance/scrubber.py",
        (
            (
                "for tier in self._verifiers:\n            self._tasks",
                "for tier in ():\n            self._tasks",
            ),
        ),
    ),
    Mend(
        "10a",
        "ends of chains in nvme, while it refuses writes and is not full",
        "no test saw whether they stay",
        "they stay, and are read; a put waits",
        (
            "tests/appliance/core/copying/test_refusals.py::"
            "test_a_put_waits_where_room_would_cost_what_nvme_has",
        ),
        "appliance/core/capacity/pressure.py",
        (("end == row or (self.refusals.is_pausing and not self.refusals.is_full)", "end == row"),),
    ),
    Mend(
        "10b",
        "TCP connections of the daemon's own limit",
        "no test saw it: one set a limit itself",
        "{tcp_connections:,.0f} of 1,033 stay open",
        ("tests/e2e/test_overload.py::test_tcp_connections_are_bounded",),
        "appliance/server/grpc_server.py",
        (('    "grpc.max_allowed_incoming_connections": MAX_CONNECTIONS + 1,  # and the probe\'s\n', ""),),
    ),
    Mend(
        "10c",
        "eviction of more than one step's blocks",
        "no test saw whether a tick is asked for",
        "goes on without another event",
        (
            "tests/appliance/core/capacity/test_dirty.py::"
            "test_a_tier_far_above_its_watermark_is_brought_down_without_another_event",
        ),
        "appliance/core/capacity/pressure.py",
        (("                return step\n        self.is_busy = True\n", "                return step\n"),),
    ),
    Mend(
        "11a",
        "a tenant, or a user that sends `kv_hints` to its engine, states retention",
        "0 of 6 blocks of another tenant stay below the watermark",
        "{retained_beside:.0f} of 6, its half of what there may be",
        (
            "tests/appliance/core/requests/test_shares_of_tenants.py::"
            "test_what_a_tenant_says_of_retention_costs_no_other_one_its_part_of_memory",
        ),
        "appliance/core/capacity/victims.py",
        (("self._crowding(tier) if self._core.catalog.retained else None", "None"),),
    ),
    Mend(
        "11b",
        "rankings that one tenant asks for over the local channel, beside 64 hosts",
        "another tenant's lookups take 118 ms (p50), at most 0.75 s",
        "one of a tenant goes on at a time, of 200 at once those beyond 64 are refused; 6 ms",
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
        "250; another tenant's lookups take 12.5 ms beside 10 puts of 512 blocks, where they take 0.1",
        "{watches_of_a_tenant:.0f} of 8 (in a daemon 32 of 64)",
        ("tests/security/test_watch.py::test_streams_of_one_tenant_leave_others_theirs",),
        "appliance/server/grpc_server.py",
        (("self._watches = Shares(MAX_WATCHES)", "self._watches = Shares(1 << 20)"),),
    ),
    Mend(
        "11d",
        "connections to the data port of a host, without a ticket",
        "the oldest goes, that of another host that connects just then too",
        "the oldest of the address that has the most goes",
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
        "holds the event loop for 80 to 170 ms with each",
        "more than 20,480 end its stream; reading pauses for five times what a message takes",
        (
            "tests/appliance/fleet/test_hostile_host.py::"
            "test_more_names_than_a_host_sends_at_once_end_its_stream",
        ),
        "appliance/fleet/hosts.py",
        (("    if num_names > MAX_NAMES_AT_ONCE:\n", "    if False:\n"),),
    ),
    Mend(
        "11f",
        "no process to be had when a daemon died",
        "the supervisor ends, and all memory with it",
        "tried again once a second; memory is kept",
        ("tests/e2e/test_kept_memory.py::test_memory_stays_while_no_process_can_be_had",),
        "appliance/supervisor.py",
        (("if not self.kept or self._is_to_end_within(FORK_RETRY_S):", "if True:"),),
    ),
    Mend(
        "11g",
        "exports of one tenant into a store that hosts share",
        "0 bundles of another tenant, once the day's budget is sent or under way",
        "1 of 1, of the part that is reserved for it",
        ("tests/appliance/core/capacity/test_exports.py::test_one_tenant_does_not_use_up_the_budget_of_all",),
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
        "wait before all that come later; 4,096 of them push those of others out",
        "tenants take turns, and each has its share of the places",
        (
            "tests/appliance/core/capacity/test_exports.py::test_tenants_take_turns",
            "tests/appliance/core/capacity/test_exports.py::"
            "test_bundles_of_one_tenant_that_wait_leave_the_others_their_places",
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
        "1,000 of 1,000 are searches under way, before all that others fetch",
        "128 of 1,000; another tenant's fetch waits for fewer than 20 of 300 that are queued",
        (
            "tests/appliance/core/requests/test_sources_of_tenants.py::"
            "test_searches_of_one_tenant_leave_the_others_their_share",
        ),
        "appliance/core/requests/searches.py",
        (("Shares(MAX_SEARCHES, core.options.num_tenants)", "Shares(1 << 20, core.options.num_tenants)"),),
    ),
    Mend(
        "11j",
        "searches of one tenant that are queued for the store",
        "another tenant's fetch lands after all 300",
        "before the twentieth",
        (
            "tests/appliance/transfer/test_searches.py::"
            "test_a_fetch_waits_for_few_of_the_searches_of_another_tenant",
            "tests/appliance/transfer/test_searches.py::test_searches_and_fetches_alternate",
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
        "11l",
        "fetches of one tenant from another host with a deadline of 4 ms",
        "0 of 16 blocks of another tenant in 9 of 10 reads: that host is not asked for seconds",
        "late ones of less than 0.25 s say nothing about the host",
        (
            "tests/appliance/fleet/test_hostile_host.py::"
            "test_callers_with_little_time_do_not_make_a_host_silent",
        ),
        "appliance/fleet/peer_edge.py",
        (("TELLING_S: Final = 0.25", "TELLING_S: Final = 0.0"),),
    ),
    Mend(
        "11m",
        "a prompt of one tenant of 256 bundles that the store has",
        "another tenant's 256 blocks are computed in 8 s instead of fetched in 0.5",
        "they come in twice the time that they take alone: tenants take turns",
        (
            "tests/appliance/core/requests/test_sources_of_tenants.py::"
            "test_what_one_tenant_fetches_leaves_another_its_part_of_the_source",
            "tests/appliance/core/copying/test_source_speed.py::"
            "test_what_others_have_on_their_way_counts_as_far_as_it_goes_before_a_fetch",
        ),
        "appliance/core/copying/source_speed.py",
        (("min(held, own) for other", "held for other"),),
    ),
    Mend(
        "11n",
        "fetches of one tenant that wait to begin, here and at another host",
        "another tenant's begins after all of them",
        "after one of them",
        (
            "tests/appliance/core/requests/test_sources_of_tenants.py::"
            "test_tenants_take_turns_in_beginning_to_fetch",
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
        "one EndSession with archive of a tenant with a full quota of nvme",
        "holds the event loop for 116 ms a step, 63 steps long, with chains of 1,024 blocks",
        "1.9 ms a step: what is looked at for a block to make way is bounded, and goes on in the next step",
        (
            "tests/appliance/core/capacity/test_archiving.py::"
            "test_a_long_chain_at_a_full_quota_is_looked_at_in_parts",
        ),
        "appliance/core/capacity/cold_quota.py",
        (("MAX_VISITS = 4096", "MAX_VISITS = 1 << 40"),),
    ),
    Mend(
        "12b",
        "blocks of one tenant's ended sessions that wait for the cold store",
        "wait before those of all others, one block many times, without a bound",
        "tenants take turns, a block waits once, and each tenant has its share of the places",
        (
            "tests/appliance/core/capacity/test_archiving.py::test_tenants_take_turns",
            "tests/appliance/core/capacity/test_archiving.py::"
            "test_blocks_of_one_tenant_that_wait_leave_the_others_their_places",
        ),
        "appliance/core/capacity/archiving.py",
        (
            ("            self._turns.move_to_end(tenant)\n", ""),
            ("if not self._shares.may_take(tenant, len(handles)):", "if False:"),
        ),
    ),
    Mend(
        "12g",
        "a drain of a daemon that holds many blocks",
        "looks at all of them in one step of the event loop",
        "at 128 in a step: of 3,199 steps for 409,600 blocks 99 % take 3.2 ms or less, the longest 8.1",
        ("tests/appliance/core/requests/test_keeping.py::test_a_drain_looks_at_few_blocks_in_a_step",),
        "appliance/core/capacity/archiving.py",
        (("        while row < end and num_left:\n", "        while row < end:\n"),),
    ),
    Mend(
        "11k",
        "fetches of one tenant with a deadline of 2 ms",
        "12 of them: a store of 1,828 MB/s is taken for one of 1 MB/s, and nothing is fetched for a minute",
        "say nothing about its speed",
        (
            "tests/appliance/core/copying/test_source_speed.py::test_callers_with_little_time_do_not_make_it_slow",
        ),
        "appliance/core/copying/source_speed.py",
        ((" or not begun.tells:", ":"),),
    ),
    Mend(
        "12c",
        "returns of one tenant's sessions that are announced and do not happen",
        "4 of 870 blocks come up that another tenant announced rightly",
        "870 of 870",
        (
            "tests/appliance/core/promotion/test_prefetch.py::"
            "test_wrong_announcements_of_one_tenant_are_not_counted_against_another",
            "tests/appliance/core/promotion/test_prefetch.py::"
            "test_announced_blocks_of_one_tenant_leave_another_its_share_of_memory",
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
        "65,536 of them, and every bundle of another one has to be searched for again",
        "the tenant that has the most forgets its oldest",
        (
            "tests/appliance/core/requests/test_sources_of_tenants.py::"
            "test_names_that_one_tenant_asks_for_do_not_make_those_of_others_forgotten",
        ),
        "appliance/core/copying/source_index.py",
        (('return tenant_of(namespace.identity.domain) if namespace is not None else ""', 'return ""'),),
    ),
    Mend(
        "12e",
        "lookups of one tenant in an index of what hosts hold",
        "16 at a time, and no host has what others ask for",
        "8 of the 16",
        ("tests/appliance/fleet/test_memory_of_tenants.py::test_looks_of_one_tenant_leave_others_theirs",),
        "appliance/fleet/index.py",
        (("not self._shares.take(part.tenant, 1):", 'not self._shares.take("", 1):'),),
    ),
    Mend(
        "12f",
        "65,536 blocks of one tenant that hosts tell of, that are ranked, or that a store lacks",
        "those of all others are forgotten: hand-overs are computed, second turns sent elsewhere",
        "the tenant that has the most forgets its oldest",
        (
            "tests/appliance/fleet/test_memory_of_tenants.py::"
            "test_what_hosts_tell_of_one_tenants_chains_leaves_those_of_others",
            "tests/appliance/fleet/test_memory_of_tenants.py::"
            "test_prompts_that_one_tenant_has_ranked_do_not_make_those_of_others_forgotten",
            "tests/appliance/fleet/test_memory_of_tenants.py::"
            "test_answers_for_one_tenant_do_not_make_those_for_others_forgotten",
            "tests/appliance/fleet/test_memory_of_tenants.py::"
            "test_what_a_store_lacks_of_one_tenant_does_not_make_that_of_others_forgotten",
        ),
        "appliance/core/remembered.py",
        (
            (
                "        known = self._of_tenant[tenant]\n",
                "        known = next(iter(self._of_tenant.values()))\n",
            ),
        ),
    ),
]
