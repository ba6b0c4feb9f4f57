"""Which versions of each runtime its plug-in was tested with; others are refused when the runtime starts.
vLLM's connector has a way of its own (vllm/versions.py); here it stands for the tiers below its CPU pool.

The interfaces of plug-ins are experimental upstream and change shape between minor versions (constructor,
tensor layout, failure reports). A refusal with a message beats wrong KV. A new version is a new entry here
and a green run of `make test-<runtime>`, which reads the installed one.
"""

from ..errors import PreconditionFailed

#: A version, or the beginning of versions that stand for one another.
SUPPORTED = {"vLLM": ("0.32",), "SGLang": ("0.5.23",), "LMCache": ("0.5",)}


def check_version(runtime: str, version: str) -> None:
    """Raise PreconditionFailed unless `version` of `runtime` is one of SUPPORTED."""
    supported = SUPPORTED[runtime]
    if not f"{version}.".startswith(tuple(f"{one}." for one in supported)):
        raise PreconditionFailed(
            f"kvtier's plug-in was not tested with {runtime} {version}, only with {', '.join(supported)}; "
            "install one of those, or run without the plug-in",
            reason="UNSUPPORTED_RUNTIME",
        )
