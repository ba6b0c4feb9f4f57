"""Prefill here, decode there: what one engine tells the other, through whatever proxy is between them.

A proxy marks the request of the prefill engine with `do_remote_decode` in its `kv_transfer_params`, and puts
what the answer has there into the request of the decode engine: vLLM's toy proxy, llm-d's sidecar and Dynamo
do. That is

    kvtier_source: {epoch, num_tokens, last, namespace}

`epoch` (hexadecimal: some proxies cut JSON's numbers short) names the life of the daemon that has the
blocks, `num_tokens` is how much of the prompt they hold, `last` the name of the last one and `namespace` the
digest of theirs. A proxy that asks both engines at once may say `host` alone, the daemon's address as the
fleet's members have it: the decode engine names the blocks itself.

It is a hint. Of other weights, another split over devices or another prompt it is not followed, nor where a
connector beside this one has taken the hand-over: then its blocks are on their way already. Models with
recurrent state, or with windows at checkpoints only, look up as ever: there is no chain of these to wait for.
Keys of other connectors are not used, so that the answers of all can be merged.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...values.types import ExpectedBlocks
from ..groups import Group, alignment_of

KEY = "kvtier_source"
DIGEST_CHARACTERS = 32
MAX_NAME = 256


class HandoverSource(NamedTuple):
    """Where the blocks of a request's prompt are, or will be. Empty fields are not known."""

    host: str = ""
    epoch: int = 0
    num_tokens: int = 0
    namespace: str = ""

    def expected(self, num_blocks: int, wait_s: float) -> ExpectedBlocks:
        """Return what a call says of the first `num_blocks` blocks it names."""
        return ExpectedBlocks(self.host, self.epoch, num_blocks, wait_s)

    def is_of(self, digest: bytes) -> bool:
        """Whether the blocks are of the namespace with this digest, as far as is known."""
        return self.namespace in ("", digest.hex()[:DIGEST_CHARACTERS])


def source_of(request: Any, groups: Sequence[Group]) -> tuple[HandoverSource | None, bool]:
    """Return what a request says of its hand-over, None of none, and whether it says one that is refused."""
    params = request.kv_transfer_params
    if not isinstance(params, Mapping) or KEY not in params:
        return None, False
    are_chains = all(group.is_chain for group in groups)
    if not isinstance(params[KEY], Mapping) or not are_chains or _is_of_other(params):
        return None, True
    said, size = params[KEY], alignment_of(groups)
    host, epoch, namespace = said.get("host", ""), _epoch(said.get("epoch", "0")), said.get("namespace", "")
    whole = request.num_prompt_tokens // size * size
    num_tokens = said.get("num_tokens", whole)
    if (
        not (
            isinstance(host, str) and len(host) <= MAX_NAME and host.isascii() and isinstance(namespace, str)
        )
        or epoch is None
        or not (host or epoch)
        or not isinstance(num_tokens, int | float)
        or not 0 < num_tokens <= whole
        or num_tokens % size
        or said.get("last", (last := _name_at(request, groups, int(num_tokens)))) != last
    ):
        return None, True
    return HandoverSource(host if not epoch else "", epoch, int(num_tokens), namespace), False


def told_of(
    request: Any,
    groups: Sequence[Group],
    where: Callable[[], tuple[int, bytes] | None],
    num_tokens: int,
) -> dict[str, Any] | None:
    """Return `kv_transfer_params` for the engine that decodes; None where none was asked for.

    `where` returns epoch and namespace of the daemon; `num_tokens` of the prompt are computed."""
    params = request.kv_transfer_params
    if not isinstance(params, Mapping) or params.get("do_remote_decode") is not True:
        return None
    size, found = alignment_of(groups), where()
    num_tokens = min(num_tokens, request.num_prompt_tokens) // size * size
    if found is None or not num_tokens:
        return None
    epoch, digest = found
    return {
        KEY: {
            "epoch": f"{epoch:x}",
            "num_tokens": num_tokens,
            "last": _name_at(request, groups, num_tokens),
            "namespace": digest.hex()[:DIGEST_CHARACTERS],
        }
    }


def _is_of_other(params: Mapping[str, Any]) -> bool:
    """Whether another connector of the engine was told to take the blocks."""
    return bool(params.get("do_remote_prefill")) and bool(
        params.get("remote_engine_id") or params.get("transfer_id")
    )


def _epoch(said: Any) -> int | None:
    try:
        epoch = int(said, 16) if isinstance(said, str) else -1
    except ValueError:
        return None
    return epoch if 0 <= epoch < 1 << 64 else None


def _name_at(request: Any, groups: Sequence[Group], num_tokens: int) -> str:
    """Return the name of the block that ends with a prompt's token `num_tokens`, hexadecimal."""
    hash_tokens = groups[0].block_tokens // groups[0].hashes_per_block
    number = num_tokens // hash_tokens
    hashes = request.block_hashes
    return bytes(hashes[number - 1]).hex() if 0 < number <= len(hashes) else ""
