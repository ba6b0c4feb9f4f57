"""Mends 6 to 10, and 11f: ids, hostile daemons and files, rules of the planner, what no test saw."""

from .mend import Mend

_OVERLOAD = "tests/e2e/test_overload.py::"
_FILES = "tests/e2e/test_administrators_files.py::"
_LIES = "tests/clients/links/test_hostile_daemon.py::"
_REQUESTS = "tests/appliance/core/requests/"

STATE = [
    Mend(
        "6",
        "ids of leases, pins, reservations, namespaces and clients",
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
        "reports {blocks_of_a_lie:.0f} of 3 blocks",
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
        "a deadline of 0.2 s ends after {flood_s:.2f} s",
        (_LIES + "test_a_flood_of_late_answers_does_not_outlast_a_deadline",),
        "clients/links/link.py",
        (("if num_late_reads > _MAX_LATE_READS or now - late_since > _MAX_LATE_S:", "if False:"),),
    ),
    Mend(
        "8a",
        "a pipe in place of the policy file",
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
        "the process ends in {stop_while_hanging_s:.1f} s, while the read hangs",
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
        "refused as damaged",
        ("tests/tiers/encryption/test_tenant_keys.py::test_a_damaged_key_file_is_refused",),
        "tiers/encryption/keyring.py",
        (("AttributeError, RecursionError) as error", "AttributeError) as error"),),
    ),
    Mend(
        "8d",
        "clients that connect at once",
        "{connected_at_once:.0f} of 300 wait in the queue of each socket, and are served",
        (_OVERLOAD + "test_connections_that_come_together_wait",),
        "appliance/server/unix_listener.py",
        (("BACKLOG = 4096", "BACKLOG = 128"),),
    ),
    Mend(
        "9a",
        "a pin of a block that never reached its floor",
        "keeps it in the tier that it is in until the pin ends",
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
        "{small_stores_passed:.0f} of 5 seeds of the simulator pass, verified and not",
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
        "namespaces without records, after a start",
        "{namespaces_after_a_start:.0f} of 100 count towards the limit",
        (_REQUESTS + "test_namespaces.py::test_a_start_forgets_namespaces_without_records",),
        "appliance/core/planner.py",
        (("            self.requests.forget(namespace)\n", "            pass\n"),),
    ),
    Mend(
        "9d",
        "an administrator's own learner in `shared` that raises",
        "is told nothing more; policies go on",
        (
            "tests/policies/test_guarded.py::test_a_learner_that_fails_is_told_nothing_more_and_its_policy_goes_on",
        ),
        "policies/guarded.py",
        (
            (
                "                return question()\n            except (Exception, SystemExit) as error:\n"
                "                self._trouble.note(error)\n",
                "                return question()\n            finally:\n                pass\n",
            ),
        ),
    ),
    Mend(
        "9e",
        "a LoRA folder rewritten under a running engine",
        "is a miss, and nothing is saved, until the adapter is loaded anew",
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
        "at most {erased_in_a_step:,.0f} of {erased_blocks:,.0f} blocks in a step",
        (_REQUESTS + "test_erasing.py::test_a_large_tenant_goes_in_steps",),
        "appliance/core/requests/erasing.py",
        (("list(islice(job.handles, STEP_BLOCKS))", "list(job.handles)"),),
    ),
    Mend(
        "9h",
        "a cold store too small for what must stay",
        "writes {segments_in_vain:.0f} segments anew in 600 s",
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
        "is repeated: nvme is back after {failed_appends:.0f} failures, with the first success",
        (
            "tests/appliance/test_store_tasks.py::test_a_store_that_failed_is_asked_again_and_comes_back",
            "tests/tiers/cold/test_manifest.py::test_after_a_failure_the_next_event_goes_to_a_new_file",
        ),
        "appliance/store_tasks.py",
        (("                self._loop.call_later(delay_s, begin)\n", "                pass\n"),),
    ),
    Mend(
        "9j",
        "what rots at rest",
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
        "ends of chains in nvme that refuses writes and is not full",
        "stay, and are read; a put waits",
        (
            "tests/appliance/core/copying/test_refusals.py::"
            "test_a_put_waits_where_room_would_cost_what_nvme_has",
        ),
        "appliance/core/capacity/pressure.py",
        (
            (
                "end == row or (refusals.is_pausing and not (refusals.is_full or refusals.is_stopped))",
                "end == row",
            ),
        ),
    ),
    Mend(
        "10b",
        "TCP connections beyond the daemon's limit",
        "{tcp_connections:,.0f} of 1,033 stay open",
        ("tests/e2e/test_overload.py::test_tcp_connections_are_bounded",),
        "appliance/server/grpc_server.py",
        (('    "grpc.max_allowed_incoming_connections": MAX_CONNECTIONS + 1,  # and the probe\'s\n', ""),),
    ),
    Mend(
        "10c",
        "eviction of more than one step's blocks",
        "goes on without another event",
        (
            "tests/appliance/core/capacity/test_dirty.py::"
            "test_a_tier_far_above_its_watermark_is_brought_down_without_another_event",
        ),
        "appliance/core/capacity/pressure.py",
        (("                return step\n        self.is_busy = True\n", "                return step\n"),),
    ),
    Mend(
        "11f",
        "no process to be had when a daemon dies",
        "tried again once a second; memory is kept",
        ("tests/e2e/test_kept_memory.py::test_memory_stays_while_no_process_can_be_had",),
        "appliance/supervisor.py",
        (("if not self.kept or self._is_to_end_within(FORK_RETRY_S):", "if True:"),),
    ),
]
