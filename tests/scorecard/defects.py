"""Defects of KV-cache stores that were reported in public, and the tests that fail here if one is made."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Defect:
    """What went wrong elsewhere, where that can be read, and the tests that hold kvtier to it.

    `[name]` of a test is a mutant of the simulator: the defect itself, planted, and seen.
    """

    threads: str
    what: str
    tests: tuple[str, ...]


_MUTANT = "tests/sim/test_sim.py::test_mutant_is_killed"
_GETS = "tests/appliance/core/requests/test_gets.py::"
_PUTS = "tests/appliance/core/requests/test_puts.py::"
_STORE = "tests/tiers/cold/test_store.py::"
_FAILURES = "tests/tiers/cold/test_store_failures.py::"
_DIRECT = "tests/e2e/test_direct.py::"
_BAD_INPUT = "tests/e2e/test_bad_input.py::"

DEFECTS = [
    Defect(
        "vllm 45704, 46278",
        "blocks are copied out of the device before the kernel has written them",
        (_DIRECT + "test_a_put_reads_what_the_kernel_before_its_event_wrote",),
    ),
    Defect(
        "vllm 47282, 47324",
        "a load overwrites a block that a kernel still reads",
        (_DIRECT + "test_a_get_does_not_write_pages_that_a_kernel_before_its_event_still_uses",),
    ),
    Defect(
        "vllm 48596, 46951, 29870",
        "a deferred store runs after its block was recycled, and saves another one's bytes under its name",
        (f"{_MUTANT}[late-hold]", _GETS + "test_a_collected_load_holds_its_source"),
    ),
    Defect(
        "vllm 35092",
        "blocks are stored, and found, before they have arrived",
        (f"{_MUTANT}[publish-early]", _PUTS + "test_a_put_becomes_visible_when_its_bytes_have_landed"),
    ),
    Defect(
        "dynamo 15079, 6032, 5012",
        "a failed transfer counts as done",
        (f"{_MUTANT}[failed-load-is-ready]", _GETS + "test_a_failed_load_shortens_the_prefix"),
    ),
    Defect(
        "vllm 52234, 52276",
        "a stale handle returns what its memory holds now",
        (
            f"{_MUTANT}[same-generation]",
            "tests/tiers/memory/test_one_sided.py::test_a_slot_recycled_during_the_copy_is_a_miss",
        ),
    ),
    Defect(
        "vllm 21570, 20139",
        "the producer times out and frees what a slow consumer still reads",
        (f"{_MUTANT}[forced-expiry]", _GETS + "test_an_overdue_lease_of_a_local_client_keeps_its_memory"),
    ),
    Defect(
        "Mooncake 4239, 3076",
        "a lease is measured on one path only; a batch accepts what has expired",
        (
            _GETS + "test_a_lease_that_ends_early_is_not_filled_any_more",
            _GETS + "test_a_retry_that_comes_after_the_release_is_told_of_no_places",
        ),
    ),
    Defect(
        "pegaflow 403",
        "a timeout gives memory back that a device still writes",
        (
            _DIRECT + "test_memory_that_a_device_may_still_touch_is_kept_until_it_is_shut_down",
            _PUTS + "test_the_death_of_a_client_frees_no_slot_that_is_being_written",
        ),
    ),
    Defect(
        "nixl 2067",
        "cancelling a transfer frees what its completion will touch",
        (
            f"{_MUTANT}[cancelled-is-over]",
            _DIRECT + "test_cancel_returns_when_the_pages_are_the_caller_s_again",
        ),
    ),
    Defect(
        "sglang 31427, 28468, 27108",
        "a copy on the host is evicted while it is loaded or written back",
        (f"{_MUTANT}[late-hold]", _GETS + "test_held_blocks_are_no_victims"),
    ),
    Defect(
        "LMCache 4133",
        "a lookup promises more than the retrieval finds",
        (f"{_MUTANT}[reported-let-go]", _GETS + "test_what_was_reported_stays_until_the_release"),
    ),
    Defect(
        "LMCache 3022, 3855",
        "an allocation fails in the middle of a batch: unread buffers are returned, a lock stays held",
        (
            _FAILURES + "test_the_nth_system_call_failing_never_loses_the_thread",
            _PUTS + "test_without_room_by_its_deadline_the_rest_is_refused",
        ),
    ),
    Defect(
        "LMCache 4991, 2635",
        "a failed store stays visible to lookups",
        (f"{_MUTANT}[failure-is-success]", _FAILURES + "test_a_failed_write_stores_nothing"),
    ),
    Defect(
        "LMCache 4385, 207",
        "the disk returns another request's bytes without an error",
        (
            _STORE + "test_another_identity_is_refused",
            "tests/tiers/cold/test_damage.py::test_swapped_segments_answer_nothing",
        ),
    ),
    Defect(
        "LMCache 4086, 690",
        "the hash of an image is folded or left out: an answer about another picture",
        ("tests/clients/values/test_values.py::test_everything_the_kv_depends_on_changes_the_name",),
    ),
    Defect(
        "vllm 44250, 42125, LMCache 2961",
        "an adapter is missing from the key, or counted by its name: other weights, old blocks",
        (
            "tests/clients/values/test_values.py::test_everything_the_kv_depends_on_changes_the_name",
            "tests/clients/test_weights.py::test_other_weights_of_the_same_shapes_differ",
        ),
    ),
    Defect(
        "vllm 44701",
        "an adapter that is named like another tenant's salt finds its blocks",
        (
            "tests/docs/test_prefix_hash.py::test_the_vectors_differ_from_each_other",
            "tests/docs/test_prefix_hash.py::test_namespaces_have_the_digest_that_is_specified",
        ),
    ),
    Defect(
        "sglang 38362, vllm 54338, 45562",
        "the key ignores the format of the values: bits of one type are read as another",
        (
            "tests/tiers/cold/test_manifest.py::test_a_changed_identity_is_another_one_or_refused",
            f"{_MUTANT}[namespaces-share-keys]",
        ),
    ),
    Defect(
        "sglang 37160",
        "a tenant's salt is dropped on the way to the store: another tenant's prefix is served",
        (
            "tests/security/test_isolation.py::test_nothing_of_another_tenant_is_found_nor_deduplicated_in_any_tier",
        ),
    ),
    Defect(
        "LMCache 5069",
        "file names are made of names by a rule that is not injective",
        (
            "tests/tiers/cold/test_damage.py::test_a_renamed_segment_is_missing_there_and_foreign_here",
            "tests/clients/memory/test_one_sided.py::test_prefix_hash_is_compared_in_full",
        ),
    ),
    Defect(
        "sglang 31926",
        "two processes write one directory and destroy each other's files",
        (
            _STORE + "test_a_second_owner_fails_at_once_and_is_told_who_the_first_is",
            _STORE + "test_a_replaced_lock_is_noticed",
        ),
    ),
    Defect(
        "Mooncake 3826, 3771",
        "after a failover two keys own one range",
        (
            f"{_MUTANT}[append-over]",
            _STORE + "test_of_two_records_of_a_fragment_the_newest_wins",
            "tests/crash/test_store_loop.py",
        ),
    ),
    Defect(
        "LMCache 1034, 2004, 2785, 3381, pegaflow 57",
        "pins are never released, or twice; the remedy frees memory that is still read",
        (
            f"{_MUTANT}[release-twice]",
            "tests/appliance/core/requests/test_keeping.py::"
            "test_a_pinned_block_stays_at_its_floor_until_the_pin_ends",
        ),
    ),
    Defect(
        "LMCache 4676, 4715, vllm 46283, sglang 21624, 28902, Mooncake 2475",
        "what a dead or silent client held is never given back; a full disk is full for ever",
        (
            _BAD_INPUT + "test_a_client_that_dies_after_reserving_gives_its_room_back",
            _BAD_INPUT + "test_a_remote_client_that_falls_silent_gives_everything_back",
            "tests/e2e/test_bad_disk.py::test_a_disk_that_fills_up_meanwhile_loses_nothing",
            "tests/appliance/core/copying/test_refusals.py::test_it_is_asked_again_and_used_when_it_says_yes",
        ),
    ),
]
