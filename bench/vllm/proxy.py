"""`python -m bench.vllm.proxy PROXY [--nixl]`: vLLM's own toy proxy before two real engines and two daemons.

PROXY is `toy_proxy_server.py` out of vLLM's sources (tests/v1/kv_connector/nixl_integration), which no
package contains. It asks one `vllm serve` to prefill a prompt and the other one to decode it; each has a
daemon of its own, and the daemons are a fleet. Then parts are killed: a daemon before a prompt, the prefill
daemon while decode waits for it, the prefill engine. Every answer is compared, token for token, with that of
an engine which neither loads nor finds anything of the prompt.

With `--nixl` vLLM's NixlConnector stands beside kvtier's in a MultiConnector (it needs the package `nixl`),
behind it in the prefill engine, before it in the other: it moves the hand-over, and kvtier keeps the blocks.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench.machine import print_machine
from bench.table import render
from bench.vllm.appliance import ApplianceProcess
from bench.vllm.measure import versions
from bench.vllm.models import FIRST_TOKEN, FOLDER, VOCABULARY
from bench.vllm.options import EngineOptions, environment_of, kvtier_connector
from tests.ports import free_port
from tests.waiting import until

START_S, WAIT_S, ASK_S = 300.0, 120.0, 120.0
BLOCK, NUM_BLOCKS, NUM_NEW = 32, 30, 8
MODEL = FOLDER / "tiny"
OF_ALL = ("vllm:external_prefix_cache_hits_total",)
OF_OURS = ("vllm:kvtier_hit_tokens_host_total", "vllm:kvtier_hit_tokens_disk_total")
ALONE = {"kvtier_load": False, "kvtier_save": False}


class Answer(NamedTuple):
    """What came of one prompt. `num_found`: of its tokens, loaded and not computed; `num_ours`: by kvtier."""

    tokens: list[int]
    num_found: int
    num_ours: int
    took_s: float


class Server:
    """A process that answers HTTP, and its log."""

    def __init__(self, command: list[str], port: int, log: Path, environment: dict[str, str]) -> None:
        self.url, self._log = f"http://127.0.0.1:{port}", log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, start_new_session=True
            )

    def wait(self, path: str) -> None:
        """Return when it answers. Raises SystemExit with the end of its log."""
        ends_at = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(self.url + path, timeout=5).read()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > ends_at:
                    raise SystemExit(
                        f"{self.url} does not answer:\n{self._log.read_text()[-4000:]}"
                    ) from None
                time.sleep(0.2)

    def num_loaded(self) -> tuple[int, int]:
        """Return the tokens that an engine has loaded, and those that kvtier has brought.

        An answer's usage has those of prefill, where NIXL has brought them."""
        lines = urllib.request.urlopen(self.url + "/metrics", timeout=5).read().decode().splitlines()
        counted = [line.rpartition(" ") for line in lines if line.startswith(OF_ALL + OF_OURS)]
        of_all, of_ours = (
            sum(float(value) for name, _, value in counted if name.startswith(names))
            for names in (OF_ALL, OF_OURS)
        )
        return round(of_all), round(of_ours)

    def ask(
        self,
        prompt: list[int],
        transfer: dict[str, Any] | None = None,
        salt: str = "",
        through: Server | None = None,
        rank: int | None = None,
    ) -> Answer:
        """Return what it, or a proxy before it, answers to a prompt. Raises urllib.error.HTTPError.

        `rank`: of an engine with several, by data."""
        body: dict[str, Any] = {
            "model": str(MODEL),
            "prompt": prompt,
            "max_tokens": NUM_NEW,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        body |= {"kv_transfer_params": transfer} if transfer else {}
        body |= {"cache_salt": salt} if salt else {}
        request = urllib.request.Request(
            (through or self).url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"}
            | ({} if rank is None else {"X-data-parallel-rank": str(rank)}),
        )
        before, began = self.num_loaded(), time.monotonic()
        answer = json.loads(urllib.request.urlopen(request, timeout=ASK_S).read())
        took_s, after = time.monotonic() - began, self.num_loaded()
        found, ours = (there - here for here, there in zip(before, after, strict=True))
        return Answer(answer["choices"][0]["token_ids"], found, ours, took_s)

    def kill(self) -> None:
        """End it and its children with SIGKILL."""
        subprocess.run(["kill", "-9", "--", f"-{self.process.pid}"], check=False, stderr=subprocess.DEVNULL)
        self.process.wait()


def serve(
    connector: dict[str, Any] | None, port: int, log: Path, environment: dict[str, str], *words: str
) -> Server:
    """Start `vllm serve` of the small model; `words` are further ones of its command."""
    options = {
        "--port": port,
        "--host": "127.0.0.1",
        "--dtype": "float32",
        "--block-size": BLOCK,
        "--max-model-len": 4096,
        "--max-num-batched-tokens": 256,
        "--max-num-seqs": 8,
        "--num-gpu-blocks-override": 1024,
        **({"--kv-transfer-config": json.dumps(connector)} if connector else {}),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL), *words]
    command += [*(str(part) for pair in options.items() for part in pair)]
    return Server(command, port, log, environment_of(EngineOptions(environment=environment)))


class Scene:
    """Two engines behind the proxy, and their daemons."""

    def __init__(self, stack: ExitStack, proxy: Path, folder: Path, has_nixl: bool) -> None:
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        settings = (f"peers.hosts=[{', '.join(addresses)}]", "access.insecure=true", "observe.http=off")
        self.of_prefill, self.of_decode = (
            stack.enter_context(ApplianceProcess(nvme="", settings=settings, address=one))
            for one in addresses
        )
        ports = [free_port() for _ in range(3)]
        self.prefill = self._engine(self.of_prefill, ports[0], folder / "prefill.log", has_nixl)
        stack.callback(self.prefill.kill)
        self.decode = self._engine(self.of_decode, ports[1], folder / "decode.log", has_nixl)
        stack.callback(self.decode.kill)
        words = [str(proxy), "--port", str(ports[2]), "--prefiller-hosts", "127.0.0.1", "--prefiller-ports"]
        words += [str(ports[0]), "--decoder-hosts", "127.0.0.1", "--decoder-ports", str(ports[1])]
        environment = environment_of(EngineOptions())
        self.proxy = Server([sys.executable, *words], ports[2], folder / "proxy.log", environment)
        stack.callback(self.proxy.kill)
        for engine in (self.prefill, self.decode):
            engine.wait("/health")
        self.proxy.wait("/healthcheck")

    def _engine(self, daemon: ApplianceProcess, port: int, log: Path, has_nixl: bool) -> Server:
        connector = kvtier_connector(daemon.target, handover_wait_s=WAIT_S)
        environment: dict[str, str] = {}
        if has_nixl:
            nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
            both = {"connectors": [connector, nixl] if daemon is self.of_prefill else [nixl, connector]}
            connector = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": both,
            }
            environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        return serve(connector, port, log, environment)

    def hand_over(self, prompt: list[int]) -> Answer:
        """Return what the proxy answers, and what decode has found. Raises urllib.error.HTTPError."""
        return self.decode.ask(prompt, through=self.proxy)

    def wait_until_they_know_each_other(self, new_prompt: Callable[[], list[int]]) -> None:
        """Return when decode's daemon has fetched a prompt."""
        until(
            lambda: self.decode.ask(self.asked_of_prefill(new_prompt())).num_ours,
            "decode finds nothing of what prefill has computed",
        )

    def asked_of_prefill(self, prompt: list[int]) -> list[int]:
        """Return a prompt that the prefill engine has computed."""
        self.prefill.ask(prompt)
        return prompt


def run(scene: Scene) -> list[list[str]]:
    """Return a row for each prompt: what happened, tokens that decode found, seconds, whether right."""
    chance, rows = random.Random(19), list[list[str]]()

    def new_prompt() -> list[int]:
        return [chance.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(NUM_BLOCKS * BLOCK + 5)]

    def row(words: str, prompt: list[int], got: Answer) -> None:
        # Another salt has other names: nothing of the prompt is found, in vLLM's own cache neither.
        expected = scene.decode.ask(prompt, ALONE, salt="alone")
        assert not expected.num_found
        is_same = "yes" if got.tokens == expected.tokens and len(got.tokens) == NUM_NEW else "NO"
        found = f"{got.num_found} of {len(prompt)}"
        rows.append([words, found, str(got.num_ours), f"{got.took_s:.2f}", is_same])

    scene.wait_until_they_know_each_other(new_prompt)
    for _ in range(3):
        row("handed over", prompt := new_prompt(), scene.hand_over(prompt))
    prompt = scene.asked_of_prefill(new_prompt())
    row("asked of one, then of the other, without the proxy", prompt, scene.decode.ask(prompt))
    scene.of_decode.kill()
    row("decode's daemon is dead", prompt := new_prompt(), scene.hand_over(prompt))
    scene.of_decode.start()
    scene.wait_until_they_know_each_other(new_prompt)
    row("handed over again", prompt := new_prompt(), scene.hand_over(prompt))
    prompt, before = new_prompt(), scene.of_decode.status().counters["acquires_expecting"]
    answers = list[Answer]()
    asking = threading.Thread(target=lambda: answers.append(scene.hand_over(prompt)))
    asking.start()
    while asking.is_alive() and scene.of_decode.status().counters["acquires_expecting"] == before:
        time.sleep(0.002)
    scene.of_prefill.kill()
    asking.join()
    row("prefill's daemon dies meanwhile", prompt, answers[0])
    row("prefill's daemon is dead", prompt := new_prompt(), scene.hand_over(prompt))
    scene.prefill.kill()
    prompt = new_prompt()
    try:
        scene.hand_over(prompt)
        raise SystemExit("the proxy answered without a prefill engine")
    except urllib.error.HTTPError:  # it knows no other way
        row("prefill is dead, decode asked directly", prompt, scene.decode.ask(prompt))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm.proxy")
    parser.add_argument("proxy", type=Path, help="toy_proxy_server.py, out of vLLM's sources")
    parser.add_argument("--nixl", action="store_true", help="NixlConnector beside, under MultiConnector")
    args = parser.parse_args()
    print_machine(versions())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-proxy-")))
        rows = run(Scene(stack, args.proxy, folder, args.nixl))
    print(render(["", "found by decode", "by kvtier", "s", "same tokens"], rows))
    if any(row[-1] != "yes" for row in rows):
        raise SystemExit("an answer is another one")


if __name__ == "__main__":
    main()
