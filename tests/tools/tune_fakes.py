"""Cells of a sweep as tests write them, and what runs them in place of servers."""

from rocline.tools.tune_cells import GIB, Cell, Outcome

SHA256, OTHER_SHA256 = "a" * 64, "b" * 64
CELLS = [Cell(64, 1.0), Cell(64, 2.0), Cell(128, 1.0), Cell(128, 2.0)]


def done(cell, rate=100.0, headroom_gib=2.0, *, share=0.5, allocs=0, sha256=SHA256, headroom=None):
    return Outcome(
        chunk_rows=cell.chunk_rows,
        arena_gib=cell.arena_gib,
        status="done",
        ttft_s=1000 / rate,
        prefill_tokens_per_s=rate,
        min_headroom_bytes={"0 0000:03:00.0": int(headroom_gib * GIB), "1": 9 * GIB} if headroom is None else headroom,
        device_allocs=allocs,
        arena_share=share,
        output_sha256=sha256,
    )


def failed(cell, status="failed", note="no room"):
    return Outcome(chunk_rows=cell.chunk_rows, arena_gib=cell.arena_gib, status=status, note=note)


class FakeRunner:
    """In place of CellRunner. outcomes: by cell, what to return or raise; called: (cell, limit_s) so far."""

    def __init__(self):
        self.outcomes, self.called = {}, []
        self.made_with = None
        self.on_call = lambda: None

    def __call__(self, cell, limit_s):
        self.called.append((cell, limit_s))
        self.on_call()
        outcome = self.outcomes.get(cell, done(cell))
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    @property
    def cells(self):
        return [cell for cell, _ in self.called]
