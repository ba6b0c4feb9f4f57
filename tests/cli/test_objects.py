"""`kvtier objects` over a store in a folder: what it lists, finds damaged, and says of mistakes."""

import importlib.util
import json
import time
import uuid
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvtier.appliance.cli import objects_expire
from kvtier.appliance.cli.app import cli
from kvtier.sources.objects.fleet_keys import FleetKeys
from kvtier.sources.objects.keys import Epochs, bundle_key
from kvtier.sources.objects.store import ObjectStore
from kvtier.tiers.encryption.master_keys import MasterKeys
from tests.sources.objects.bundles import RED, make_bundle
from tests.sources.objects.gateway import Gateway

if importlib.util.find_spec("obstore") is None:
    pytest.skip(
        "no object stores: `pip install obstore`, as requirements.txt pins it", allow_module_level=True
    )

OLD, FUTURE = "20200101", "20991231"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["objects", *arguments])


def filled(folder: Path) -> list[str]:
    """Store two bundles in an epoch to come and one in a dead one; return their keys, sorted."""
    store = ObjectStore(f"file://{folder}")
    keys = []
    for seed, epoch, codec in ((1, FUTURE, "identity"), (2, FUTURE, "planes"), (1, OLD, "identity")):
        made = make_bundle(2, seed=seed, codec=codec)
        keys.append(str(bundle_key(epoch, "tenant:red", RED.digest, made.chain.names[-1])))
        assert store.create(keys[-1], made.bundle.data)
    return sorted(keys)


def test_folders_are_listed_with_what_is_in_them(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "v1" / "b" / "notes.txt").write_text("not a bundle")
    answer = json.loads(run("ls", f"file://{tmp_path}", "--json").stdout)
    found = {(row["epoch"], row["is_dead"]): row["num_bundles"] for row in answer["folders"]}
    assert found == {(OLD, True): 1, (FUTURE, False): 2}
    assert {row["namespace"] for row in answer["folders"]} == {RED.digest.hex()}
    assert (answer["num_other"], answer["other_bytes"]) == (1, 12)
    text = run("ls", f"file://{tmp_path}")
    assert (text.exit_code, text.stderr) == (0, "")
    assert f"{OLD}  dead" in text.stdout
    assert "1 other object, 12 B" in text.stdout


def test_the_state_of_a_folder_follows_the_days_of_an_epoch(tmp_path: Path) -> None:
    epoch = Epochs(1).alive(time.time())[0]
    made = make_bundle(1)
    key = bundle_key(Epochs(30).alive(time.time())[-1], "tenant:red", RED.digest, made.chain.names[-1])
    ObjectStore(f"file://{tmp_path}").create(str(key), made.bundle.data)
    for days, is_dead in (("1", True), ("30", False)):
        answer = json.loads(run("ls", f"file://{tmp_path}", "--epoch-days", days, "--json").stdout)
        assert [row["is_dead"] for row in answer["folders"]] == [is_dead], epoch


def test_a_bundle_says_what_is_in_it(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    assert run("ls", f"file://{tmp_path}", "--keys").stdout.split() == keys
    made = make_bundle(2, seed=1)
    answer = json.loads(run("stat", f"file://{tmp_path}", keys[0], "--json").stdout)
    assert answer["namespace"] == RED.digest.hex()
    assert answer["blocks"] == [name.hex() for name in made.chain.names]
    assert answer["bytes"] == len(made.bundle)
    assert answer["raw_bytes"] == sum(map(len, made.payloads))
    assert answer["fragments_by_codec"] == {"0": 6}
    text = run("stat", f"file://{tmp_path}", keys[0])
    assert text.exit_code == 0
    assert RED.digest.hex() in text.stdout


def test_every_byte_is_verified(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    whole = run("verify", f"file://{tmp_path}")
    assert (whole.exit_code, whole.stderr) == (0, "")
    assert whole.stdout.startswith("3 bundles, ")
    damaged = tmp_path / keys[1]
    data = bytearray(damaged.read_bytes())
    for at in (0, 200, len(data) // 2, len(data) - 1):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        found = run("verify", f"file://{tmp_path}", "--json")
        assert found.exit_code == 1
        assert list(json.loads(found.stdout)["damaged"]) == [keys[1]]
        assert "1 bundle damaged; delete" in found.stderr
    damaged.write_bytes(data[:-5])
    assert "announced" in run("verify", f"file://{tmp_path}").stdout
    assert run("verify", f"file://{tmp_path}", "--under", f"v1/b/{OLD}/").exit_code == 0
    assert damaged.exists()
    deleted = run("verify", f"file://{tmp_path}", "--delete-bad")
    assert (deleted.exit_code, deleted.stderr) == (0, "")
    assert "1 damaged and deleted" in deleted.stdout
    assert [(tmp_path / key).exists() for key in keys] == [True, False, True]


def test_a_bundle_under_a_name_of_another_is_damaged(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    (tmp_path / keys[1]).write_bytes((tmp_path / keys[2]).read_bytes())
    found = run("verify", f"file://{tmp_path}")
    assert found.exit_code == 1
    assert f"{keys[1]}  it is another bundle than its key names" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ls", "bucket"], 2, "s3://BUCKET/PREFIX"),
        (["ls", "file:///does/not/exist"], 1, "create it"),
        (["stat", "{}", "v1/b/none"], 1, "ls {} --keys"),
        (["verify", "{}", "--under", "v1/m/"], 2, "v1/b/"),
        (["verify", "{}", "--under", "v1/b/2026"], 2, "with a / at its end"),
        (["ls", "{}", "--epoch-days", "0"], 2, "1<=x<=365"),
    ],
)
def test_mistakes_are_told_with_the_fix(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    address = f"file://{tmp_path}"
    result = run(*(word.format(address) for word in arguments))
    assert result.exit_code == code
    assert words.format(address) in result.stderr
    assert "Traceback" not in result.output


# ------------------------------------------------------------------------------------------ check


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    result = run("check", f"file://{tmp_path}", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    names = [one["name"] for one in answer["results"]]
    assert names == [
        *("list", "create", "create only", "listed at once", "ranges", "copy inside", "clock"),
        "delete",
    ]
    assert {one["problem"] for one in answer["results"]} == {""}
    assert answer["rules"] is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert "run `kvtier objects expire --delete`" in run("check", f"file://{tmp_path}").stdout


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "v1").write_text("a file where a folder has to be")
    result = run("check", f"file://{tmp_path}")
    assert result.exit_code == 1
    assert "lacks: " in result.stderr


def test_a_real_gateway_is_tried_and_its_rules_are_compared(
    s3: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    bucket = f"kv-{uuid.uuid4().hex[:12]}"
    address = f"s3://{bucket}/some/prefix"
    missing = run("check", address)
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "create it" in missing.stderr
    s3.make_bucket(bucket)
    without = run("check", address, "--json")
    assert without.exit_code == 1
    assert "lacks: lifecycle" in without.stderr
    answer = json.loads(without.stdout)
    assert [one["problem"] for one in answer["results"] if one["problem"]] == [
        "no rule covers v1/b/: dead epochs stay for ever; give the store the rules below"
    ]
    s3.set_lifecycle(bucket, answer["rules"])
    told = run("check", address, "--json")
    assert told.exit_code == 0, told.output
    longer = run("check", address, "--epoch-days", "7")
    assert longer.exit_code == 1
    assert "what is read for up to 21" in longer.stdout
    assert json.loads(run("ls", address, "--json").stdout)["folders"] == []


def test_what_is_dead_is_listed_and_deleted_only_when_told_so(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    dead = {f"v1/b/{OLD}/": 1}
    listed = run("expire", f"file://{tmp_path}")
    assert [line.split(" ")[0] for line in listed.stdout.splitlines()[:1]] == [*dead]
    assert "would be deleted" in listed.stdout
    answer = json.loads(run("expire", f"file://{tmp_path}", "--json").stdout)
    assert {row["folder"]: row["num_objects"] for row in answer["folders"]} == dead
    assert stored(tmp_path) == {*keys}
    answer = json.loads(run("expire", f"file://{tmp_path}", "--delete", "--json").stdout)
    assert answer["is_deleted"]
    assert {row["folder"]: row["num_objects"] for row in answer["folders"]} == dead
    assert stored(tmp_path) == {key for key in keys if FUTURE in key}
    assert run("expire", f"file://{tmp_path}").stdout == "no epoch is dead\n"


def test_a_large_epoch_is_deleted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_expire, "BATCH", 2)
    filled(tmp_path)
    store = ObjectStore(f"file://{tmp_path}")
    for number in range(4):
        store.create(f"v1/b/{OLD}/{number}", memoryview(b"x"))
    answer = json.loads(run("expire", f"file://{tmp_path}", "--delete", "--json").stdout)
    assert [row["num_objects"] for row in answer["folders"]] == [5]
    assert not any(OLD in key for key in stored(tmp_path))


def test_nothing_is_deleted_by_a_clock_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = filled(tmp_path)
    monkeypatch.setattr(time, "time", lambda: time.monotonic() + 5e9)  # the year 2128
    refused = run("expire", f"file://{tmp_path}", "--delete")
    assert refused.exit_code == 1
    assert "hours ahead of the store's; set it; nothing was deleted" in refused.stderr
    assert stored(tmp_path) == set(keys)


def stored(folder: Path) -> set[str]:
    """Return the keys of a store in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_tenant_is_erased_without_a_key_and_another_one_is_not(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}")
    keys = FleetKeys(MasterKeys(bytes(range(32))))
    keys.open(store)
    before = keys.key_for_writing("tenant:red")
    filled(tmp_path)
    made = make_bundle(1)
    blue = str(bundle_key(FUTURE, "tenant:blue", RED.digest, made.chain.names[-1]))
    store.create(blue, made.bundle.data)
    refused = CliRunner().invoke(cli, ["objects", "erase-tenant", f"file://{tmp_path}", "red"], input="n\n")
    assert refused.exit_code != 0
    assert keys.key("tenant:red", before.id) == before
    answer = json.loads(run("erase-tenant", f"file://{tmp_path}", "red", "--yes", "--json").stdout)
    assert answer == {"num_bundles": 3}
    assert [one.key for one in store.objects("v1/b/")] == [blue]
    keys.refresh(0)
    assert keys.names("tenant:red") is None
    assert (
        run("erase-tenant", f"file://{tmp_path}", "red", "--yes").stdout == "erased red: 0 bundles deleted\n"
    )
    wrong = run("erase-tenant", f"file://{tmp_path}", "red/eu", "--yes")
    assert (wrong.exit_code, "group:NAME" in wrong.stderr) == (2, True)
