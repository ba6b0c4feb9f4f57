"""`kvtier serve` and `vllm serve` beside each other, and questions over HTTP as any OpenAI client asks them.

The examples start the pair themselves, on the CPU and with a model of random weights, so that they run
anywhere; nothing in them knows kvtier but the one line of `CONNECTOR`. Its memory is kept so small that it
holds one conversation: what it has to forget is what an appliance is for.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from examples.daemon import ExampleDaemon
from examples.network import free_port

MODEL = Path(__file__).parent.parent.parent / ".cache" / "vllm-models" / "tiny"
START_S = 600.0
STOP_S = 60.0
CONNECTOR = {
    "kv_connector": "KvtierConnector",
    "kv_connector_module_path": "kvtier.clients.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
BLOCK_TOKENS, NUM_BLOCKS, MAX_TOKENS = 32, 136, 4096
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
    "GOMP_SPINCOUNT": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Completion:
    text: str
    num_tokens: int  # of the prompt
    num_cached: int  # of these not computed
    ttft_s: float


def daemon() -> ExampleDaemon:
    """Return an appliance with little memory and a disk, to be used as a context manager."""
    return ExampleDaemon(["tiers.dram.capacity=256MiB", "tiers.nvme.capacity=1GiB"])


class Server:
    """`vllm serve` with the appliance at `target`. Use it as a context manager."""

    def __init__(self, target: str, folder: Path) -> None:
        if not MODEL.exists():
            raise SystemExit(f"{MODEL} is not there: run `python -m bench.vllm.models tiny`")
        self.port = free_port()
        self.log = folder / "vllm.log"
        command = [str(Path(sys.executable).with_name("vllm")), "serve", str(MODEL), "--port", str(self.port)]
        command += ["--served-model-name", "tiny", "--dtype", "bfloat16", "--enforce-eager"]
        command += ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(NUM_BLOCKS)]
        command += ["--max-model-len", str(MAX_TOKENS), "--enable-prompt-tokens-details"]
        self._command = [*command, "--kv-transfer-config", json.dumps(CONNECTOR)]
        self._environment = {**os.environ, **ENVIRONMENT, "KVTIER_TARGET": target}
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, prompt: str, num_new: int = 16, salt: str = "") -> Completion:
        """Complete a prompt. With a new `salt`, nothing stored can serve it."""
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": num_new, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        if salt:
            body["cache_salt"] = salt
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        asked_at_s = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        first_at_s, words = 0.0, []
        usage: dict[str, Any] = {}
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            first_at_s = first_at_s or time.perf_counter()
            words += [choice["text"] for choice in event["choices"]]
            usage = event.get("usage") or usage
        connection.close()
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return Completion("".join(words), usage["prompt_tokens"], cached, first_at_s - asked_at_s)

    def ask_uncached(self, prompt: str, num_new: int = 16) -> Completion:
        """Complete the same question under a new salt: the time to wait without a cache."""
        return self.ask(prompt, num_new, salt=secrets.token_hex(8))

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels, from vLLM's /metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0] == name)

    def start(self) -> Self:
        """Start it and wait until it answers. Raises RuntimeError with the end of its log."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
        deadline_s = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"vLLM does not serve:\n{self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        return self

    def stop(self) -> None:
        """Let it leave in order, then make sure that none of its processes is left."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        finally:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False
