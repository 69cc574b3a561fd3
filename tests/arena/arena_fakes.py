"""Streams whose work finishes when a test says so, and the check that spans tile a slab."""


class FakeStreams:
    """record_completion of a driver without a device: each call is one piece of work on that stream."""

    def __init__(self):
        self.work = {}  # stream -> [done] in the order of the releases
        self.asked = 0

    def record(self, stream):
        pieces = self.work.setdefault(stream, [])
        pieces.append(False)
        at = len(pieces) - 1

        def done():
            self.asked += 1
            return pieces[at]

        return done

    def finish(self, stream, n=None):
        """The oldest n unfinished pieces of a stream, or all."""
        pieces = self.work.get(stream, [])
        for at in [at for at, done in enumerate(pieces) if not done][:n]:
            pieces[at] = True

    def finish_all(self):
        for stream in self.work:
            self.finish(stream)


def check_tiles(arena):
    """Spans tile the slab, no two free ones touch, and the statistics are the sums. Returns the layout."""
    layout = arena.layout()
    end, before = 0, None
    for offset, size_bytes, state, _ in layout:
        assert offset == end, f"{state} at {offset}, but the span below ends at {end}"
        assert size_bytes > 0
        assert not (state == before == "free"), f"two free spans touch at {offset}"
        end, before = offset + size_bytes, state
    assert end == arena.slab_bytes
    stats = arena.stats()
    total = {state: sum(row[1] for row in layout if row[2] == state) for state in ("used", "pending", "kept", "free")}
    assert stats.used_bytes == total["used"]
    assert stats.pending_bytes == total["pending"]
    assert stats.kept_bytes == total["kept"]
    assert stats.free_bytes == total["free"] + total["kept"]
    assert stats.largest_free_bytes == max((row[1] for row in layout if row[2] == "free"), default=0)
    assert stats.n_used == sum(row[2] == "used" for row in layout)
    assert stats.n_pending == sum(row[2] == "pending" for row in layout)
    assert stats.n_free == sum(row[2] in ("free", "kept") for row in layout)
    check_runs(arena._slab)
    return layout


def check_runs(slab):
    """Whatever is unfinished lies in runs of its stream, no two of which touch, and in no free span."""
    for line in slab.timelines.values():
        runs = sorted((begin, begin + size) for part in line.runs for begin, size in part.starts.items())
        for part in line.runs:
            assert not set(part.starts) & set(part.ends), "two runs of a stream touch"
        unfinished = list(line.unfinished.within(0, slab.slab_bytes))
        for begin, end in unfinished:
            assert sum(max(0, min(end, b) - max(begin, a)) for a, b in runs) == end - begin
        assert line.unfinished.total_bytes == sum(end - begin for begin, end in unfinished)
        assert line.unfinished or not runs, "runs with nothing unfinished in them are free for all"
