"""What the arena counts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """One moment of an arena. used + pending + free = slab; counters run from the arena's start."""

    slab_bytes: int
    used_bytes: int  # lent
    pending_bytes: int  # released, work not seen to finish
    free_bytes: int  # finished, kept_bytes among them
    kept_bytes: int  # finished and held whole by the reuse layer
    high_water_bytes: int  # most used_bytes so far
    largest_free_bytes: int  # largest free span, without what the reuse layer would give back
    n_used: int
    n_pending: int
    n_free: int
    takes: int
    releases: int
    reuses: int  # takes served by the reuse layer
    splits: int
    merges: int
    recuts: int  # kept spans given back and cut for a smaller request
    fuses: int  # runs of free spans and the stream's own pending ones lent as one
    waits: int  # takes that waited for pending work
    refusals: int  # takes that failed for want of room
    device_allocs: int  # of the slab's owner; 1 for ever after the start

    @property
    def external_fragmentation(self) -> float:
        """Share of the free bytes that one request cannot have: 0 when all of it is one span."""
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0
