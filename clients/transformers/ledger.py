"""Ledger: which tokens a cache holds the past of, as the model was seen to read them.

The store files keys and values under the tokens they were computed from. Asking the user for those tokens
was rejected: a list that is off by one, or belongs to the next turn, would file right bytes under wrong
names, and every later prompt with those names would be answered wrongly. So a hook on the model writes down
what each forward pass reads. A pass that is not plain text in plain order (padding, images, positions of
one's own, embeddings in place of tokens) spoils the ledger, and a spoiled cache is never stored.

No pass waits for the device: tensors are kept as they came, the verdict stays on the device, and both are
read when `rows` is asked for.
"""

from collections.abc import Mapping
from typing import Any

import torch

# What a pass may be told without changing keys and values.
HARMLESS = frozenset(
    {
        *("input_ids", "past_key_values", "attention_mask", "position_ids", "cache_position"),
        *("use_cache", "logits_to_keep", "return_dict", "labels"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    }
)


class Ledger:
    """Tokens of a batch, [row, token]. `spoiled` names what made it useless; empty while it is right."""

    def __init__(self, rows: list[list[int]] | None = None, spoiled: str = "") -> None:
        self.spoiled = spoiled
        self._rows = rows or []  # all of one length
        self._fresh: list[Any] = []  # tensors [row, token], not read yet
        self._num_fresh = 0
        self._doubts: list[tuple[str, Any]] = []  # (what, boolean on the device: it is as it should be)

    @property
    def num_tokens(self) -> int:
        """Tokens in each row."""
        return (len(self._rows[0]) if self._rows else 0) + self._num_fresh

    def rows(self) -> list[list[int]]:
        """Return all tokens; waits for the device. A spoiled ledger has none."""
        if not self.spoiled:
            self.spoiled = next((what for what, is_right in self._doubts if not bool(is_right)), "")
        self._doubts = []
        if self.spoiled:
            return []
        if self._fresh:
            fresh = torch.cat([ids.cpu() for ids in self._fresh], dim=1).tolist()
            old: list[list[int]] = self._rows or [[] for _ in fresh]
            self._rows = [before + after for before, after in zip(old, fresh, strict=True)]
            self._fresh, self._num_fresh = [], 0
        return self._rows

    def is_read_anew(self, named: Mapping[str, Any]) -> bool:
        """Whether a pass begins with the ledger's tokens again, all or some of them.

        Then its mask covers itself alone, or its positions begin at 0. Those of one token are not looked at:
        decoding would wait for the device."""
        ids, mask, positions = (named.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        if not self.num_tokens or ids is None or ids.ndim != 2:
            return False
        begins = mask is not None and mask.ndim == 2 and mask.shape[1] == ids.shape[1]
        if mask is None and positions is not None and (ids.shape[1] > 1 or not self._num_fresh):
            begins = not bool(positions[..., 0].any())
        num_tokens = min(ids.shape[1], self.num_tokens)
        return begins and ids[:, :num_tokens].tolist() == [row[:num_tokens] for row in self.rows()]

    def read(self, num_cached: int, module: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> int:
        """Note one forward pass over a cache of `num_cached` tokens; return how many it reads."""
        ids: Any = named["input_ids"] if "input_ids" in named else (args[0] if args else None)
        self.spoiled = self.spoiled or self._objection(num_cached, module, ids, args, named)
        if self.spoiled:
            return 0 if ids is None else int(ids.shape[-1])
        num_new = int(ids.shape[1])
        last = num_cached + num_new
        mask, positions = named.get("attention_mask"), named.get("position_ids")
        if mask is not None:
            self._doubt("padding", mask.bool().all())
        if positions is not None:
            expected = torch.arange(num_cached, last, device=positions.device)
            self._doubt("positions", (positions == expected).all())
        self._fresh.append(ids.detach())
        self._num_fresh += num_new
        return num_new

    def drop(self, num_tokens: int) -> None:
        """Forget the last tokens: the cache was cropped."""
        if num_tokens and self.rows():
            self._rows = [row[:-num_tokens] for row in self._rows]

    def copy(self) -> "Ledger":
        """Return a ledger that goes on by itself."""
        rows = [list(row) for row in self.rows()]
        return Ledger(rows, self.spoiled)

    def _objection(
        self, num_cached: int, module: Any, ids: Any, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> str:
        if ids is None or ids.ndim != 2 or len(args) > 1:
            return "no tokens"
        if module.training:
            return "training"
        if num_cached != self.num_tokens or (self._rows and len(ids) != len(self._rows)):
            return "not all tokens were seen"
        mask, positions = named.get("attention_mask"), named.get("position_ids")
        if mask is not None and (mask.ndim != 2 or mask.shape[1] != num_cached + ids.shape[1]):
            return "a mask of one's own"
        if positions is not None and positions.ndim != 2:
            return "positions"
        return next((name for name, value in named.items() if name not in HARMLESS and value is not None), "")

    def _doubt(self, what: str, is_right: Any) -> None:
        """Keep one verdict per cause, however many passes there are."""
        for number, (known, earlier) in enumerate(self._doubts):
            if known == what:
                self._doubts[number] = (what, earlier & is_right.to(earlier.device))
                return
        self._doubts.append((what, is_right))
