"""`kvtier objects` over a store in a folder: what it lists, finds damaged, and says of mistakes."""

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvtier.appliance.cli.app import cli
from kvtier.sources.objects.keys import Epochs, bundle_key
from kvtier.sources.objects.store import ObjectStore
from tests.sources.objects.bundles import RED, make_bundle

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
    import time

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


def test_a_bundle_under_a_name_of_another_is_damaged(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    (tmp_path / keys[1]).write_bytes((tmp_path / keys[2]).read_bytes())
    found = run("verify", f"file://{tmp_path}")
    assert found.exit_code == 1
    assert f"{keys[1]}  it is another bundle than its key names" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ls", "bucket"], 1, "s3://BUCKET/PREFIX"),
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
