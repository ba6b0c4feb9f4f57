"""Tables of the product as the documentation prints them."""

from kvtier.appliance.errors import REASONS
from kvtier.appliance.observability.metrics_table import GROUPS, LABELS
from kvtier.appliance.replay.models import CATALOGUE
from kvtier.appliance.security.rights import RIGHTS, Role


def error_table_markdown() -> str:
    """Return REASONS as the Markdown table of docs/api.md."""
    lines = ["| reason | gRPC code | condition | recovery |", "|---|---|---|---|"]
    for reason, row in REASONS.items():
        lines.append(f"| `{reason}` | `{row.code.name}` | {row.condition} | {row.recovery} |")
    return "\n".join(lines) + "\n"


def matrix_markdown() -> str:
    """Return the table as Markdown: every call, and the answer to each kind of caller."""
    lines = [
        "| call | no certificate | wrong authority | another tenant's things | tenant | admin, no tenant |",
        "|---|---|---|---|---|---|",
    ]
    for name, right in RIGHTS.items():
        foreign = f"`{right.foreign}`" if right.foreign else "answered; nothing of the other's"
        tenant, admin = "answered", "answered"
        if right.role is Role.ADMIN:
            foreign = tenant = "`NOT_ADMIN`"
        elif right.role is Role.HOST:
            foreign = tenant = admin = "`NOT_A_HOST`"
        elif right.role is Role.TENANT:
            admin = "`NO_TENANT`"
        lines.append(f"| `{name}` | no connection | no connection | {foreign} | {tenant} | {admin} |")
    return "\n".join(lines) + "\n"


def catalogue_markdown() -> str:
    """Return the catalogue as a Markdown table."""
    lines = ["| `--model` | attention | bytes a token | with `:fp8` | of which windows | source |"]
    lines.append("|---|---|---:|---:|---:|---|")
    for name, model in CATALOGUE.items():
        windows = f"{model.windowed_share:.0%}" if model.windowed_share else "-"
        sizes = f"{model.token_bytes():,} | {model.token_bytes('fp8'):,}"
        link = f"[{model.source}](https://huggingface.co/{model.source}/blob/main/config.json)"
        lines.append(f"| `{name}` | {model.attention} | {sizes} | {windows} | {link} |")
    return "\n".join(lines) + "\n"


def metrics_markdown() -> str:
    """Return the table for docs/metrics.md."""
    parts = []
    for title, metrics in GROUPS.items():
        parts.append(
            f"\n## {title}\n\n| metric | kind | labels | what it is | what it is for |\n"
            "|---|---|---|---|---|\n"
        )
        for metric in metrics:
            what = metric.what + (f" Always: {metric.invariant}." if metric.invariant else "")
            labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
            parts.append(f"| `{metric.name}` | {metric.kind} | {labels} | {what} | {metric.use} |\n")
    labels = "".join(f"| `{label}` | {values} |\n" for label, values in sorted(LABELS.items()))
    parts.append(f"\n## Labels\n\nAll from closed sets.\n\n| label | values |\n|---|---|\n{labels}")
    return "".join(parts)
