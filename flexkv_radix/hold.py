"""What a task holds of the tier until it is over: pins, staged slots, a pull job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from flexkv_radix.tier import ShmRadixMatch, StagedRadixInsert
from radixshmem import PullJob


@dataclass(slots=True)
class Hold:
    """Resources of one task."""

    matches: list[ShmRadixMatch] = field(default_factory=list)
    staged: list[StagedRadixInsert] = field(default_factory=list)
    job: PullJob | None = None

    @classmethod
    def joined(cls, holds: Iterable[Hold]) -> Hold:
        """One hold with what all of them had."""
        result = cls()
        for hold in holds:
            result.matches += hold.matches
            result.staged += hold.staged
        return result

    def commit(self) -> str:
        """Publish what was staged, then drop the pins.  Returns why not everything was published, or ""."""
        try:
            return "; ".join(filter(None, [staged.publish().error for staged in self._take_staged()]))
        finally:
            self.give_back()

    def give_back(self) -> None:
        """Recycle what was staged and drop the pins; a second call does nothing."""
        try:
            for staged in self._take_staged():
                staged.abort()
        finally:
            self.release_pins()

    def release_pins(self) -> None:
        """Drop the pins alone."""
        while self.matches:
            self.matches.pop().release()
        if self.job is not None:
            self.job.cancel()
            self.job = None

    def _take_staged(self) -> Iterator[StagedRadixInsert]:
        while self.staged:
            yield self.staged.pop(0)
