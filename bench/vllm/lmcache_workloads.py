"""`python -m bench.vllm.lmcache_workloads --lmcache DIR --cli DIR`: LMCache's workloads for engines.

`kv-tier-pressure` and `multi-round-chat` of `lmcache bench engine`, unchanged, send prompts to `vllm serve`
and time the first token. The engine stands before, in turns,

    alone            nothing
    lmcache          LMCache's server with all of the memory, and its `fs_native` disk tier with O_DIRECT
    lmcache+kvtier   LMCache's server with all of it but KVTIER_MIB, and kvtier with that as its disk tier
    kvtier           kvtier's connector and a daemon with all of the memory

with the same disk. The engine's own cache holds little more than the prompts that it computes. Every document
of `kv-tier-pressure` is sent once before the clock starts.

Run it with vLLM's environment, with the model that `python -m bench.vllm.models words` makes. What that lacks
(`pip install --target`, `--no-deps`):

    --lmcache   lmcache==0.5.6 aiofile caio awscrt importlib_metadata zipp nvtx redis sortedcontainers
    --cli       lmcache-cli==0.5.7rc3.dev0: 0.5.6 has no kv-tier-pressure
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.machine import ROOT, print_machine
from bench.peers import DEFAULT_DIR, install_line, is_installed, python_of
from bench.table import render
from bench.vllm.appliance import ApplianceProcess
from bench.vllm.models import path_of
from bench.vllm.options import EngineOptions, environment_of, kvtier_connector
from bench.vllm.proxy import Server
from tests.ports import free_port

ARMS = ("alone", "lmcache", "lmcache+kvtier", "kvtier")
WORKLOADS = ("kv-tier-pressure", "multi-round-chat")
CHUNK_TOKENS = 256  # of LMCache
KVTIER_MIB = 64  # an extent: what both memories have is there twice, so kvtier's is only to load through
RUN_LMCACHE = "import sys; from lmcache.cli.main import main; sys.exit(main())"


def words_of(workload: str, options: argparse.Namespace) -> list[str]:
    """Return the workload's own options."""
    if workload == "kv-tier-pressure":
        pairs = {
            "pool-size": options.documents,
            "docs-per-request": 1,  # without blending a prompt of several finds nothing
            "context-length": options.tokens,
            "system-prompt-length": 0,
            "num-requests": options.requests,
            "num-inflight-requests": 2,
        }
        prefix = "--ktp-"
    else:
        pairs = {
            "shared-prompt-length": CHUNK_TOKENS,
            "chat-history-length": options.tokens - CHUNK_TOKENS,
            "user-input-length": 50,
            "output-length": 20,
            "qps": options.qps,
            "duration": options.seconds,
        }
        prefix = "--mrc-"
    return [str(word) for name, value in pairs.items() for word in (prefix + name, value)]


class Scene:
    """An engine, and what stands behind it."""

    def __init__(self, arm: str, options: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self._options, self._folder, self._stack = options, folder, stack
        self._environment = environment_of(EngineOptions()) | {
            "LMCACHE_TRACK_USAGE": "false",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": str(ROOT / "src"),
        }
        connector: dict[str, Any] | None = None
        if arm == "kvtier":
            connector = kvtier_connector(self._daemon(options.memory_mib))
        elif arm != "alone":
            connector = self._lmcache(arm)
        self.engine = self._engine(connector)

    def _started(self, command: list[str], port: int, log: str, path: str) -> Server:
        environment = self._environment
        if log == "engine.log":  # an overlay of vLLM's environment
            environment = environment | {"PYTHONPATH": f"{ROOT / 'src'}:{self._options.lmcache}"}
        server = Server(command, port, self._folder / log, environment)
        self._stack.callback(server.kill)
        server.wait(path)
        return server

    def _daemon(self, memory_mib: int) -> str:
        settings = ("observe.http=off", "tiers.nvme.write=spill")
        daemon = ApplianceProcess(f"{memory_mib}MiB", f"{self._options.disk_gib}GiB", settings)
        return self._stack.enter_context(daemon).target

    def _lmcache(self, arm: str) -> dict[str, Any]:
        memory_mib = self._options.memory_mib
        disk: dict[str, Any]
        if arm == "lmcache":
            disk = {"type": "fs_native", "base_path": str(self._folder / "l2"), "use_odirect": True}
            disk |= {"max_capacity_gb": self._options.disk_gib, "eviction": {"eviction_policy": "LRU"}}
            (self._folder / "l2").mkdir()
        else:
            memory_mib -= KVTIER_MIB
            plugin = {"module_path": "kvtier.clients.lmcache", "class_name": "KvtierL2Adapter"}
            named = {"target": self._daemon(KVTIER_MIB), "weights": self._options.model}
            disk = {"type": "plugin", **plugin, "adapter_params": named}
        port, http = free_port(), free_port()
        given = {"host": "127.0.0.1", "port": port, "http-port": http, "l1-size-gb": memory_mib / 1024}
        given |= {"chunk-size": CHUNK_TOKENS, "max-workers": 2, "eviction-policy": "LRU"}
        # Its way without a GPU; without a name KV is pickled.
        given |= {"supported-transfer-mode": "engine_driven", "shm-name": f"lmcache-workloads-{port}"}
        given |= {"l2-adapter": json.dumps(disk)}
        command = [str(python_of(self._options.peers, "lmcache")), "-c", RUN_LMCACHE, "server"]
        command += [str(word) for name, value in given.items() for word in (f"--{name}", value)]
        self._started(command, http, "lmcache.log", "/healthcheck")
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
        }

    def _engine(self, connector: dict[str, Any] | None) -> Server:
        port, tokens = free_port(), self._options.tokens
        given = {
            "port": port,
            "host": "127.0.0.1",
            "block-size": 64,
            "max-model-len": 2 * tokens,
            "max-num-batched-tokens": 1024,
            "max-num-seqs": 2,
            "num-gpu-blocks-override": 3 * tokens // 64,
            **({"kv-transfer-config": json.dumps(connector)} if connector else {}),
        }
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "--enforce-eager"]
        command += [self._options.model]
        command += [str(word) for name, value in given.items() for word in (f"--{name}", value)]
        return self._started(command, port, "engine.log", "/health")

    def run(self, workload: str) -> dict[str, Any]:
        """Run a workload; return LMCache's summary. Raises SystemExit with what it printed."""
        out = Path(tempfile.mkdtemp(dir=self._folder))
        command = [sys.executable, "-c", RUN_LMCACHE, "bench", "engine", "--engine-url", self.engine.url]
        command += ["--workload", workload, "--model", self._options.model, "--no-interactive", "-q"]
        command += ["--json", "--no-csv", "--ignore-eos", "--output-dir", str(out)]
        command += ["--tokens-per-gb-kvcache", "65536", "--kv-cache-volume", str(self._options.chat_gib)]
        command += words_of(workload, self._options)
        environment = self._environment | {"PYTHONPATH": str(self._options.cli)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        found = list(out.glob("*.json"))
        if done.returncode or not found:
            raise SystemExit(f"{workload}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return dict(json.loads(found[0].read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=os.path.abspath, help="with a template, and 8,000 words of a token each"
    )
    parser.add_argument("--lmcache", type=Path, required=True)
    parser.add_argument("--cli", type=Path, required=True)
    parser.add_argument("--peers", type=Path, default=DEFAULT_DIR, help="where LMCache's own environment is")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--memory-mib", type=int, default=384, help="of the cache")
    parser.add_argument("--disk-gib", type=int, default=2, help="of the cache")
    parser.add_argument("--tokens", type=int, default=2048, help="of a document, or of a chat's beginning")
    parser.add_argument("--documents", type=int, default=18)
    parser.add_argument("--requests", type=int, default=36, help="for documents")
    parser.add_argument("--chat-gib", type=float, default=0.5, help="of all chats; gives how many there are")
    parser.add_argument("--qps", type=float, default=2.0, help="of chats")
    parser.add_argument("--seconds", type=float, default=12.0, help="of chats")
    options = parser.parse_args()
    if not is_installed(options.peers, "lmcache"):
        parser.error(f"LMCache is not installed: {install_line(['lmcache'], options.peers)}")
    options.model = options.model or str(path_of("words"))
    print_machine()
    rows = []
    for arm in options.arms:
        folder = Path(tempfile.mkdtemp(prefix="lmcache-workloads-"))
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            scene = Scene(arm, options, folder, stack)
            for workload in options.workloads:
                found = scene.run(workload)["results"]
                first = [f"{found[name]:,.0f}" for name in ("mean_ttft_ms", "p50_ttft_ms", "p90_ttft_ms")]
                answered = f"{found['successful_requests']} of {found['total_requests']}"
                rows.append([workload, arm, answered, *first, f"{found['input_throughput']:,.0f}"])
                print(*rows[-1], flush=True)
    heads = ["workload", "before the engine", "answered", "first token, mean ms", "p50", "p90", "tokens/s"]
    print(render(heads, sorted(rows, key=lambda row: row[0])))


if __name__ == "__main__":
    main()
