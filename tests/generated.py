"""Everything in the repository that is generated, and the one command that writes or checks it.

    python -m tests.generated --write     (make proto, make docs)
    python -m tests.generated --check     (make check; exit 1 and a list when something is stale)

A generated file is committed, so that users need no generator; this module is why it cannot drift.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

from helm.chart_files import chart_files
from helm.dashboard import dashboard_json
from kvtier.appliance.config import schema_text
from kvtier.appliance.core.catalog.states import STATE_MEANING, State
from kvtier.appliance.core.catalog.transitions import TRANSITIONS
from kvtier.clients.errors import CLIENT_REASONS
from kvtier.v1.unreachable import REASONS as UNREACHABLE

from .claims.page import claims_page
from .docs.cli_page import cli_markdown, completion_json
from .docs.settings_page import reference_table, setting_keys
from .docs.tables import catalogue_markdown, error_table_markdown, matrix_markdown, metrics_markdown
from .scorecard.page import scorecard_page
from .sync_source import sync_modules
from .vllm.matrix.page import compatibility_page

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
# protoc stamps its own version into what it writes, and an older runtime refuses to import that. But clients
# live in processes that others fill: LMCache, for one, demands protobuf 6. What is written here is what
# grpcio-tools 1.78 (protoc 6.31) writes, but for `class X(object)`, so it bears that stamp; pyproject.toml
# has the same lower bounds, and `make test-lmcache` runs under protobuf 6.
STAMPS = [
    (rb"(?m)^# Protobuf Python Version: .*$", b"# Protobuf Python Version: 6.31.1"),
    (rb"(Domain\.PUBLIC,\n)    \d+,\n    \d+,\n    \d+,\n", rb"\g<1>    6,\n    31,\n    1,\n"),
    (rb"(?m)^GRPC_GENERATED_VERSION = .*$", b"GRPC_GENERATED_VERSION = '1.78.0'"),
]
# Left out of what protoc writes: calls without a channel, an experiment of grpc's that nothing here uses and
# the typed stubs do not have. A module of a .proto file without a service is left out as a whole.
EXPERIMENTAL = rb"(?s)\n\n\n # This class is part of an EXPERIMENTAL API\..*?(?=\n\n\nclass |\Z)"


def wire_stubs() -> Iterator[tuple[Path, bytes]]:
    """Yield (path, content) of the Python modules and typed stubs of every .proto file."""
    # protoc looks for the mypy plug-ins on PATH; they are installed beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    services = "--grpc_python_out={}", "--mypy_grpc_out=quiet:{}"
    yield from _stubs("kvtier/v1", PROTO / "kvtier" / "v1", *services)
    yield from _stubs("etcd", ROOT / "sources" / "directories")  # messages only: it is not our service


def _stubs(folder: str, into: Path, *more: str) -> Iterator[tuple[Path, bytes]]:
    """Yield what protoc makes of the .proto files in a folder, with further outputs; `{}`: their folder."""
    with tempfile.TemporaryDirectory() as out:
        arguments = [
            "protoc",
            f"--proto_path={PROTO}",
            f"--proto_path={Path(grpc_tools.__file__).parent / '_proto'}",
            f"--python_out={out}",
            f"--mypy_out=quiet:{out}",
            *(one.format(out) for one in more),
            *sorted(str(p.relative_to(PROTO)) for p in PROTO.glob(f"{folder}/*.proto")),
        ]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc refused the .proto files; its message is above")
        for made in sorted(Path(out).glob(f"{folder}/*")):
            content = made.read_bytes()
            if "_pb2_grpc" in made.name and b"Stub" not in content:
                continue
            for pattern, stamp in [*STAMPS, (EXPERIMENTAL, b"\n")]:
                content = re.sub(pattern, stamp, content)
            yield into / made.name, content


def state_diagram() -> Iterator[tuple[Path, bytes]]:
    """Yield docs/states.md, drawn from the transition table."""
    arrows = "\n".join(
        f"    {before.name} --> {after.name}: {step.name.lower()}"
        for (before, step), after in TRANSITIONS.items()
    )
    states = "\n".join(f"| `{state.name}` | {STATE_MEANING[state]} |" for state in State)
    text = f"""# What can become of one fragment in one tier

Generated from `appliance/core/catalog/transitions.py` by `make docs`. Every other step is a programmer error.

```mermaid
stateDiagram-v2
    [*] --> ABSENT
{arrows}
```

| state | meaning |
|---|---|
{states}
"""
    yield ROOT / "docs" / "states.md", text.encode()


def api_reference() -> Iterator[tuple[Path, bytes]]:
    """Yield docs/api.md: every call with its comment from the .proto files, and the error table."""
    sources = "`proto/kvtier/v1/*.proto`, `appliance/errors.py`, `v1/unreachable.py` and `clients/errors.py`"
    parts = [f"# API reference\n\nGenerated from {sources} by `make docs`.\n"]
    for path in sorted(PROTO.glob("kvtier/v1/*.proto")):
        for service, body in re.findall(r"service (\w+) \{\n(.*?)\n\}", path.read_text(), re.S):
            parts.append(f"\n## {service}\n")
            for comment, signature in re.findall(r"((?:  //.*\n)+)  rpc (.*);", body):
                words = " ".join(line.strip().removeprefix("//").strip() for line in comment.splitlines())
                parts.append(f"\n`{signature}`\n\n{words}\n")
    parts.append("\n## Errors\n\nA miss is an answer, not an error. Errors carry `ErrorInfo` (gRPC) or an ")
    parts.append("`ErrorDetail` (local channel) with the reason.\n\n" + error_table_markdown())
    parts.append("\nReasons why a daemon cannot be reached, found by the client and the command line:\n\n")
    parts.append(reason_table_markdown(UNREACHABLE))
    parts.append("\nReasons that only a client gives, about what its own process holds or was given:\n\n")
    parts.append(reason_table_markdown(CLIENT_REASONS) + "\n")
    yield ROOT / "docs" / "api.md", "".join(parts).encode()


def reason_table_markdown(reasons: Mapping[str, tuple[str, str]]) -> str:
    """Return reasons, with condition and recovery, as a Markdown table of docs/api.md."""
    lines = ["| reason | condition | recovery |", "|---|---|---|"]
    lines += [
        f"| `{reason}` | {condition} | {recovery} |" for reason, (condition, recovery) in reasons.items()
    ]
    return "\n".join(lines) + "\n"


def cli_reference() -> Iterator[tuple[Path, bytes]]:
    """Yield docs/cli.md: the help of every command; and what completion knows of them."""
    yield ROOT / "docs" / "cli.md", cli_markdown().encode()
    yield ROOT / "appliance" / "cli" / "commands.json", completion_json().encode()


def metrics_reference() -> Iterator[tuple[Path, bytes]]:
    """Yield docs/metrics.md, printed from the table that is exported."""
    text = f"""# Metrics

Generated from `appliance/observability/metrics_table.py` by `make docs`. Served at `/metrics` of
`observe.http` (by default `127.0.0.1:9464`) in Prometheus's text format. The dashboard and the alert rules
that come with kvtier (`helm/kvtier/files/`) use nothing else; a test checks every expression.
{metrics_markdown()}"""
    yield ROOT / "docs" / "metrics.md", text.encode()


def dashboard() -> Iterator[tuple[Path, bytes]]:
    """Yield the Grafana dashboard."""
    yield ROOT / "helm" / "kvtier" / "files" / "dashboard.json", dashboard_json().encode()


def policy_reference() -> Iterator[tuple[Path, bytes]]:
    """Yield the JSON Schema of policy files and the page that lists every setting."""
    yield ROOT / "docs" / "policy.schema.json", schema_text().encode()
    intro = (
        "# Settings\n\nGenerated from `appliance/config/` by `make docs`. *live*: changes without a "
        "restart ([policy.md](policy.md)).\nEditors check what is written with "
        f"[policy.schema.json](policy.schema.json). There are {len(setting_keys())} settings.\n\n"
    )
    yield ROOT / "docs" / "policy-settings.md", (intro + reference_table()).encode()


def model_catalogue() -> Iterator[tuple[Path, bytes]]:
    """Yield docs/models.md: the models that a replay knows by name."""
    intro = """# Models by name

Generated from `appliance/replay/models.py` by `make docs`. Bytes of KV that a token takes, for `kvtier
replay --model NAME` ([replay](replay.md)) and for capacity planning: a budget in bytes over these is a
number of tokens. Layers, heads and dimensions are from the published configurations, active parameters (for
prefill time) from the same repositories' cards.

"""
    notes = """
- KV is bfloat16, or fp8 with `:fp8`: one byte a value, scales per tensor. With an indexer, MLA is packed as
  vLLM's `fp8_ds_mla`: 656 bytes a token and layer. The indexer's keys are fp8 with a float32 scale in both
  columns, 132 bytes.
- All layers of a token are counted, windows included: then a prompt can be continued at every block. *Of
  which windows* is the share that only a sliding window reads, which a store that keeps windows at a few
  positions only saves most of.
- Layers of draft models (MTP) are not counted. Neither are tensor parallel ranks that hold the same KV
  twice (more ranks than KV heads, or MLA).
- Models with recurrent layers (Mamba, gated delta nets) are not listed: their state belongs to a position,
  not to a token.
- Others are written as `LAYERSxHEADSxDIM:DTYPE`, with the number of KV heads.
"""
    yield ROOT / "docs" / "models.md", (intro + catalogue_markdown() + notes).encode()


def security_matrix() -> Iterator[tuple[Path, bytes]]:
    """Yield docs/security.md with the table of who may call what, printed from the one the server obeys."""
    path = ROOT / "docs" / "security.md"
    begin, end = "<!-- matrix -->\n", "<!-- end of matrix -->"
    before, _, rest = path.read_text().partition(begin)
    _, _, after = rest.partition(end)
    yield path, f"{before}{begin}{matrix_markdown()}{end}{after}".encode()


GENERATORS: list[Callable[[], Iterator[tuple[Path, bytes]]]] = [
    wire_stubs,
    sync_modules,
    state_diagram,
    api_reference,
    policy_reference,
    cli_reference,
    metrics_reference,
    dashboard,
    model_catalogue,
    security_matrix,
    chart_files,
    scorecard_page,
    compatibility_page,
    claims_page,
]


def stale() -> list[Path]:
    """Return the generated files whose committed content differs from what would be written."""
    return [
        path
        for generate in GENERATORS
        for path, content in generate()
        if not path.exists() or path.read_bytes() != content
    ]


def write() -> None:
    """Write every generated file."""
    for generate in GENERATORS:
        for path, content in generate():
            path.write_bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true")
    mode.add_argument("--check", action="store_true")
    if parser.parse_args().write:
        write()
    elif behind := stale():
        listing = "\n".join(f"  {path.relative_to(ROOT)}" for path in behind)
        sys.exit(f"stale, run `make proto docs`:\n{listing}")


if __name__ == "__main__":
    main()
