"""What a connector counts, to be shown by the engine's own metrics."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


@dataclass
class Counters:
    """Totals since the engine started.  Tokens of a load or store count once it succeeded."""

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    loads: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0
    stores: int = 0
    stored_tokens: int = 0
    failed_stores: int = 0
    errors: int = 0

    def load_ended(self, ok: bool, num_tokens: int) -> None:
        """A load of num_tokens is over."""
        self.loads += ok
        self.loaded_tokens += num_tokens * ok
        self.failed_loads += not ok

    def store_ended(self, ok: bool, num_tokens: int) -> None:
        """A store of num_tokens is over."""
        self.stores += ok
        self.stored_tokens += num_tokens * ok
        self.failed_stores += not ok

    def copy(self) -> Counters:
        return replace(self)

    def since(self, earlier: Counters) -> dict[str, int]:
        """Differences to an earlier state, those that are not 0."""
        before = asdict(earlier)
        return {name: value - before[name] for name, value in asdict(self).items() if value != before[name]}
