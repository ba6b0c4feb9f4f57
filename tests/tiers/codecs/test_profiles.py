"""Profiles as files, and records that name one: read where it is, a miss where it is not."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvtier.appliance.transfer.forward import ForwardCopier
from kvtier.tiers.base import Cause, CopyItem
from kvtier.tiers.block import FragmentLabel, Geometry, NamespaceIdentity
from kvtier.tiers.codecs.base import shape_of
from kvtier.tiers.codecs.lossy.profile import Profile, ProfileError, Rule, uniform_rules
from kvtier.tiers.codecs.lossy.profile_file import read_profile, write_profile
from kvtier.tiers.codecs.lossy.profiled import Profiled
from tests.contracts.kv_values import values_like_kv
from tests.tiers.cold.store import cold, in_slot

MODEL = b"m" * 32
PROFILE = Profile(MODEL, 4, 2, 64, 2, "bfloat16", uniform_rules(4, 2, 2, "int", 4))


def with_tables() -> Profile:
    rules = [replace(rule, coder="exact", bits=0) for rule in PROFILE.rules[1:]]
    first = Rule(0, 0, 0, 2, "transform", step=0.25, reserve_bits=3.5, table=1)
    return replace(
        PROFILE,
        rules=(first, *rules),
        tables=(b"one", b"another"),
        calibration={"kl": 1e-3, "text": "a: 'b'"},
    )


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    for number, profile in enumerate((PROFILE, with_tables())):
        path = tmp_path / f"{number}.yaml"
        write_profile(profile, path)
        found = read_profile(path)
        assert found == profile
        assert found.digest == profile.digest
    assert PROFILE.digest != with_tables().digest


def test_a_line_for_many_layers_is_the_same_profile(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "a.yaml")
    head, _ = (tmp_path / "a.yaml").read_text().split("rules:\n")
    (tmp_path / "a.yaml").write_text(
        head
        + "rules:\n- {layers: 0-3, plane: v, heads: 0-1, coder: int, bits: 4}\n"
        + "- {layers: 0-3, plane: k, heads: 0-1, coder: int, bits: 4, axis: channel}  # by hand\n"
    )
    assert read_profile(tmp_path / "a.yaml").digest == PROFILE.digest


@pytest.mark.parametrize(
    ("was", "becomes", "why"),
    [
        ("bits: 4", "bits: 5", "it was changed"),
        ("kvtier_profile: 1", "kvtier_profile: 2", "no profile of version 1"),
        ("coder: int", "coder: magic", "coder is one of"),
        ("heads: 0-1", "heads: 0-5", "rules cover"),
        ("model: 6d", "model: zz", "of another type"),
        ("rules:", "skin_tokens: 16\nrules:", "unknown fields skin_tokens"),
        ("plane: k", "plane: !!python/object/apply:os.getpid []", "could not determine a constructor"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, was: str, becomes: str, why: str) -> None:
    path = tmp_path / "a.yaml"
    write_profile(PROFILE, path)
    path.write_text(path.read_text().replace(was, becomes))
    with pytest.raises(ProfileError, match=why) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


def test_tables_that_were_changed_or_cut_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    write_profile(with_tables(), path)
    (tmp_path / "a.tables").write_bytes(b"oneanotheR")
    with pytest.raises(ProfileError, match="it was changed"):
        read_profile(path)
    (tmp_path / "a.tables").write_bytes(b"one")
    with pytest.raises(ProfileError, match="not 10 bytes long"):
        read_profile(path)


def test_a_record_is_read_by_its_profile_and_without_it_a_miss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A miss, not a loss: it is kept, copied forward and found after a restart, and read when the profile is
    back. Also where the digest ends in a zero, which a record's header does not tell from nothing."""
    salted = (replace(PROFILE, calibration={"salt": i}) for i in count())
    profile = next(profile for profile in salted if profile.digest[-1] == 0)
    geometry = Geometry(4, 2, 64, 16, "bfloat16")
    identity = NamespaceIdentity(MODEL, geometry, profile_digest=profile.digest)
    shape, codec = shape_of(geometry, 0), Profiled(profile)
    payload = values_like_kv(shape, seed=1)
    stored, decoded = np.zeros(codec.stored_bound(shape), np.uint8), np.empty_like(payload)
    codec.encode(shape, payload.data, stored.data)
    codec.decode(shape, stored.data, decoded.data)

    name, checksum = hashlib.sha256(b"1").digest(), xxhash.xxh3_128_digest(payload.data)
    whole = (0, payload.size, checksum, codec.codec_id, stored.size)
    label = FragmentLabel(identity.digest, 1, name, b"", 1, *whole)
    with cold(tmp_path) as opened:
        opened.store.codecs.adopt({profile.digest: profile})
        opened.store.store_namespace(identity)
        place = opened.room.reserve(0, stored.size)
        assert place is not None
        (outcome,) = opened.store.write_batch([(place, label, in_slot(payload.tobytes()))])
        assert (outcome.cause, outcome.checksum) == (None, xxhash.xxh3_128_digest(decoded.data))
        opened.room.settle(place)
        assert opened.get(place, label) == decoded.tobytes()
        opened.store.codecs.adopt({})
        assert opened.get(place, label) == Cause.UNREADABLE
        assert opened.get(place, label) == Cause.UNREADABLE
        assert caplog.text.count("put its file back into the directory compression.profiles") == 1
        (books,) = opened.store.codecs.statistics()
        assert (books.name, books.num_unreadable, books.num_refused) == ("profiled", 2, 0)
        with ThreadPoolExecutor(1) as pool:  # the segment is reclaimed meanwhile: nobody needs to read it
            target = opened.room.reserve(0, stored.size)
            assert target is not None
            items = [CopyItem(place, target, label)]
            assert ForwardCopier(opened.store, pool).start(items).result()[0].cause is None
            opened.room.settle(target)
        opened.seal()
    with cold(tmp_path) as again:  # a restart without it
        assert again.recovered.reasons["profile_missing"] == again.recovered.num_records == 1
        (place,) = again.recovered.records["place"].tolist()
        assert place == target
        assert again.get(place, label) == Cause.UNREADABLE
        again.store.codecs.adopt({profile.digest: profile})
        assert again.get(place, label) == decoded.tobytes()


def test_a_namespace_without_a_profile_is_the_one_it_always_was() -> None:
    plain = NamespaceIdentity(MODEL, Geometry(4, 2, 64, 16, "bfloat16"))
    assert b"profile" not in plain.canonical()
    assert replace(plain, profile_digest=PROFILE.digest).digest != plain.digest
    with pytest.raises(ValueError, match="32 bytes"):
        replace(plain, profile_digest=b"short")
