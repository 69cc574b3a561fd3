"""Which requests run, and what of them goes to the stages next (design.md sections 7 and 8).

Bookkeeping alone: no thread, no clock, no device. The engine and the simulation drive the same code.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter

from rocline.engine.handoff import Reach, RowKind, RowSpan
from rocline.engine.model import PrefillMode
from rocline.engine.pages import OutOfPages, Pages
from rocline.pipeline.request import Phase, QueueFull, TooLong

MAX_STEP_ROWS = 64  # decode rows of one step
TILE_ROWS = 64  # a chunk that is no multiple of it wastes part of a tile
SHORT_CHUNKS = 16  # mixed chunks of a prefill that is not worth joining any: it gains by being on many stages at once
REMEMBERED_ENDINGS = 16  # from which the rate of endings is taken


@dataclass(frozen=True)
class Limits:
    """
    mixed_chunk_rows       rows of a chunk while any request decodes, up to twice as many of a long prefill
    mixed_history          positions before a chunk from which on it has no more than mixed_chunk_rows
    running, queue         requests that may be admitted at a time, and that may wait for it
    n_groups               decode steps in flight, by the number of decoding requests
    reserve_tokens         output positions that admission reserves at most; the others are taken page by page
    ageing_s               time a request loses to later ones before none of them is served ahead of it any more
    mixed_inflight_chunks  chunks in flight while any request decodes. What a chunk takes in all over what it takes
                           at the slowest stage; more would only wait, and a new request's chunks behind them
    """

    chunk_rows: int
    mixed_chunk_rows: int
    inflight_chunks: int
    running: int
    queue: int
    n_groups: Callable[[int], int]
    reserve_tokens: int = 8192
    ageing_s: float = 60.0
    mixed_history: int = 1 << 20
    mixed_inflight_chunks: int = 6


@dataclass(eq=False, slots=True)
class Entry:
    """A request as the schedule sees it. Whoever adds it reads the fields; the schedule alone writes them.

    number       of its sequence on the stages; lower is earlier
    max_tokens   output tokens at most; the caller ends the request by then
    all_logits   the logits of every prompt row are wanted, which needs mode "full"
    ids          prompt and output so far
    page_table   pages of its positions, the same on every stage
    prefill_end  rows of the present prefill: the prompt, or all of `ids` when a paused request resumes
    rows_sent    rows in jobs so far; rows_done of them have come through
    logits_from  with all_logits: first position whose logits have not come through
    in_flight    jobs that hold it
    is_open      the stages keep state for it
    overtaken_s  time that went to later requests instead
    """

    number: int
    prompt_ids: Sequence[int]
    max_tokens: int
    mode: PrefillMode = "halo"
    all_logits: bool = False
    ids: array[int] = field(init=False)
    page_table: list[int] = field(default_factory=list, init=False)
    phase: Phase = field(default=Phase.QUEUED, init=False)
    prefill_end: int = field(default=0, init=False)
    reach: Reach | None = field(default=None, init=False)
    rows_sent: int = field(default=0, init=False)
    rows_done: int = field(default=0, init=False)
    logits_from: int = field(default=0, init=False)
    in_flight: int = field(default=0, init=False)
    is_open: bool = field(default=False, init=False)
    pauses: int = field(default=0, init=False)
    admitted_s: float | None = field(default=None, init=False)
    overtaken_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Raises ValueError for an empty prompt, no output, or all_logits in `halo`."""
        if not len(self.prompt_ids) or self.max_tokens < 1:
            raise ValueError(f"{len(self.prompt_ids)} prompt tokens, max_tokens {self.max_tokens}: must be 1 or more")
        if self.all_logits and self.mode != "full":
            raise ValueError(f'all_logits with mode = "{self.mode}"; only "full" runs every row to the end')
        self.ids = array("i", self.prompt_ids)

    @property
    def n_output(self) -> int:
        return len(self.ids) - len(self.prompt_ids)

    @property
    def rows_left(self) -> int:
        """Rows of its prefill that are in no job yet."""
        return self.prefill_end - self.rows_sent if self.is_open else len(self.ids)


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """Rows that cross the stages together: a chunk of one prefill, or a step of decoding requests, a row of each."""

    number: int
    kind: RowKind
    spans: tuple[RowSpan, ...]
    entries: tuple[Entry, ...]

    @property
    def is_step(self) -> bool:
        return self.kind is not RowKind.PREFILL

    @property
    def n_rows(self) -> int:
        return sum(span.n_rows for span in self.spans)

    def __str__(self) -> str:
        rows = ", ".join(f"{span.sequence}: {span.start}..{span.end - 1}" for span in self.spans)
        return f"{self.kind.value} job {self.number} (sequence: rows {rows})"


class Schedule:
    """Admits requests, cuts prompts into chunks, forms decode steps.

    After anything has happened, call `next_job` until it gives None, and bring the stages up to date: close what
    `retired` gives, then open what `opened` gives, then run the jobs, those of a sequence in order. When a job is
    through all stages, `commit` the tokens sampled from it and `end` what ends with them, then tell `done`.

    Requests wait, for admission and for their chunks, in order of the rows they have left, the shortest first. One
    that has lost ageing_s to later ones goes first, the earliest of those before the others. When pages run out the
    request admitted last is paused: its pages go back, and it waits ahead of all others. The one admitted first is
    never paused and so comes to its end, then the next: all do.

    reach  which rows of a sequence each layer runs, by mode and the sequence's end (engine/handoff.py)
    """

    def __init__(self, limits: Limits, pages: Pages, reach: Callable[[PrefillMode, int], Reach]) -> None:
        self.limits, self.pages, self._reach = limits, pages, reach
        self._n_groups = cache(limits.n_groups)
        self._waiting: list[Entry] = []  # queued and paused, the earliest first
        self._running: list[Entry] = []  # in order of admission
        self._prefilling: list[Entry] = []  # with rows that are in no job yet
        self._ready: deque[Entry] = deque()  # decoding, in no step
        self._opened: list[Entry] = []
        self._retired: list[Entry] = []
        self._n_open = self._n_decoding = self._n_paused = self._n_jobs = 0
        self._n_chunks_in_flight = self._n_steps_in_flight = 0
        self._may_admit = False  # whether something has changed since the last try
        self._now_s = self._counted_s = 0.0
        self._served = -1  # number of the request that had the latest chunk
        self._latest = -1  # greatest number of those that ran when time was last counted, or since
        self._endings_s: deque[float] = deque(maxlen=1 + REMEMBERED_ENDINGS)  # and since when there was work

    # What it has

    @property
    def queued(self) -> int:
        return len(self._waiting) - self._n_paused

    @property
    def prefilling(self) -> int:
        return len(self._running) - self._n_decoding

    @property
    def decoding(self) -> int:
        return self._n_decoding

    @property
    def paused(self) -> int:
        return self._n_paused

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return not self._waiting and not self._n_open

    def opened(self) -> list[Entry]:
        """Requests admitted since the last call, for which the stages must open a sequence."""
        opened, self._opened = self._opened, []
        return opened

    def retired(self) -> list[Entry]:
        """Requests ended or paused since the last call whose sequences the stages may close: no job holds them."""
        retired, self._retired = self._retired, []
        return retired

    # News

    def add(self, entry: Entry, now_s: float) -> None:
        """Take a request, whose number no other has had.

        Raises TooLong if all pages together would not hold it, QueueFull if it cannot start at once and as many
        wait as may.
        """
        n_positions = len(entry.prompt_ids) + entry.max_tokens
        if (n_pages := self.pages.pages_for(n_positions)) > self.pages.n_pages:
            entry.phase = Phase.ENDED
            raise TooLong(
                f"{len(entry.prompt_ids)} prompt tokens and max_tokens {entry.max_tokens} need {n_pages} pages; there "
                f"are {self.pages.n_pages}; shorten the prompt, lower max_tokens or raise --kv-tokens"
            )
        self._account(now_s)
        if self.is_idle:
            self._endings_s.clear()
            self._endings_s.append(now_s)
        insort(self._waiting, entry, key=attrgetter("number"))
        self._admit()
        if entry.phase is Phase.QUEUED and self.queued > self.limits.queue:
            self._waiting.remove(entry)
            entry.phase = Phase.ENDED
            raise QueueFull(self.queued, self._retry_after_s())

    def commit(self, entry: Entry, token: int) -> None:
        """The token after all of entry.ids, sampled from a job that `done` has not been told of. Nothing if it ended.

        One of a request that was paused meanwhile counts too: its rows ran before that.
        """
        if entry.phase is Phase.ENDED:
            return
        if not entry.in_flight or entry.rows_sent != len(entry.ids):
            raise RuntimeError(
                f"token for sequence {entry.number} in {entry.phase}: {entry.rows_sent} of {len(entry.ids)} rows in "
                f"jobs, {entry.in_flight} of them in flight; commit once a row, before the job is done"
            )
        entry.ids.append(token)
        if entry.phase is Phase.PREFILL:
            entry.phase = Phase.DECODE
            self._n_decoding += 1

    def done(self, job: Job) -> None:
        """A job is through all stages, or was dropped on the way because its requests have ended."""
        if job.is_step:
            self._n_steps_in_flight -= 1
        else:
            self._n_chunks_in_flight -= 1
        for entry, span in zip(job.entries, job.spans, strict=True):
            entry.in_flight -= 1
            entry.rows_done += span.n_rows
            entry.logits_from = max(entry.logits_from, span.end)
            if entry.phase in (Phase.ENDED, Phase.PAUSED):
                self._release(entry)
            elif entry.rows_sent == len(entry.ids) and not entry.in_flight:
                raise RuntimeError(f"{job} is done and sequence {entry.number} has neither a token nor an end")
            elif entry.phase is Phase.DECODE and not entry.in_flight:
                self._ready.append(entry)

    def end(self, entry: Entry) -> None:
        """The request has finished, failed or been cancelled; at any moment, and harmless a second time."""
        if entry.phase is Phase.ENDED:
            return
        if entry.phase in (Phase.QUEUED, Phase.PAUSED):
            self._waiting.remove(entry)
            self._n_paused -= entry.phase is Phase.PAUSED
        else:
            self._stop(entry)
        entry.phase = Phase.ENDED
        self._endings_s.append(self._now_s)
        self._may_admit = True  # one that must not be overtaken may have gone
        self._release(entry)

    # What runs next

    def next_job(self, now_s: float) -> Job | None:
        """What goes to the first stage now: a decode step, else a chunk; None when nothing can or may."""
        self._now_s = now_s
        if job := self._next_step():  # before admission, which might take the pages that a step needs
            return job
        if self._may_admit:
            self._account(now_s)
            self._admit()
        return self._next_chunk()

    def _next_step(self) -> Job | None:
        if not self._ready:
            return None
        n_groups = max(1, min(self._n_groups(self._n_decoding), self._n_decoding))
        n_places = n_groups - self._n_steps_in_flight
        if n_places <= 0:
            return None
        # Even groups: those ready now are spread over the places free now, so that groups never stay lopsided.
        n_rows = min(-(-len(self._ready) // n_places), -(-self._n_decoding // n_groups), MAX_STEP_ROWS)
        taken: list[Entry] = []
        without_pages: list[Entry] = []
        while self._ready and len(taken) < n_rows:
            entry = self._ready.popleft()
            (taken if self._has_pages(entry) else without_pages).append(entry)
        # Finding pages for one may have paused another.
        self._ready.extendleft(entry for entry in reversed(without_pages) if entry.phase is Phase.DECODE)
        taken = [entry for entry in taken if entry.phase is Phase.DECODE]
        if not taken:
            return None
        self._n_steps_in_flight += 1
        return self._job(RowKind.DECODE, [(entry, self._decode_row(entry)) for entry in taken])

    def _decode_row(self, entry: Entry) -> RowSpan:
        end = len(entry.ids)
        return RowSpan(entry.number, end - 1, 1, RowKind.DECODE, self._reach("full", end), end - 1)

    def _next_chunk(self) -> Job | None:
        limits, is_mixed = self.limits, self._n_decoding > 0
        most = min(limits.inflight_chunks, limits.mixed_inflight_chunks) if is_mixed else limits.inflight_chunks
        if not self._prefilling or self._n_chunks_in_flight >= most:
            return None
        self._account(self._now_s)
        entry = min(self._prefilling, key=self._turn)
        self._served = entry.number
        assert entry.reach is not None
        n_rows = min(self._mixed_rows(entry) if is_mixed else limits.chunk_rows, entry.rows_left)
        # A resumed request's output has no logits to give, and of its prompt those that came through are told.
        logits_from = min(entry.logits_from if entry.all_logits else entry.prefill_end, entry.prefill_end - 1)
        span = RowSpan(entry.number, entry.rows_sent, n_rows, RowKind.PREFILL, entry.reach, logits_from)
        if n_rows == entry.rows_left:
            self._prefilling.remove(entry)
        self._n_chunks_in_flight += 1
        return self._job(RowKind.PREFILL, [(entry, span)])

    def _mixed_rows(self, entry: Entry) -> int:
        """Rows of its next chunk while others decode.

        Reading the experts takes most of a small chunk's time, and twice the rows read them once as well. What a
        decode step waits for is a layer, and the longest is one that scores the history: nearer to the start a chunk
        may have more rows, so long as rows times history is no more than at mixed_history.
        """
        rows, limits = self.limits.mixed_chunk_rows, self.limits
        if entry.rows_left > SHORT_CHUNKS * rows:
            joined = min(2 * rows, rows * limits.mixed_history // max(1, entry.rows_sent))
            rows = max(rows, joined // TILE_ROWS * TILE_ROWS)
        return min(rows, limits.chunk_rows)

    def _job(self, kind: RowKind, rows: Sequence[tuple[Entry, RowSpan]]) -> Job:
        for entry, span in rows:
            entry.in_flight += 1
            entry.rows_sent = span.end
        self._n_jobs += 1
        entries, spans = zip(*rows, strict=True)
        return Job(self._n_jobs, kind, spans, entries)

    # Who waits, and for how long

    def _turn(self, entry: Entry) -> tuple[int, ...]:
        """Sorts requests by who is next."""
        if self._first_come(entry):
            return 0, entry.number
        return 1, entry.rows_left, entry.number

    def _first_come(self, entry: Entry) -> bool:
        return entry.overtaken_s >= self.limits.ageing_s or entry.phase is Phase.PAUSED

    def _account(self, now_s: float) -> None:
        """Charge the time since the last call to those who lost it: who waits to be admitted, to a later request that
        ran; who waits for a chunk, to a later one that had the last.
        """
        passed_s, self._counted_s = now_s - self._counted_s, now_s
        self._now_s = now_s
        if passed_s <= 0:
            return
        for entry in self._waiting:
            if entry.number < self._latest:
                entry.overtaken_s += passed_s
        for entry in self._prefilling:
            if entry.number < self._served:
                entry.overtaken_s += passed_s
        self._latest = max((entry.number for entry in self._running), default=-1)

    def _admit(self) -> None:
        self._may_admit = False
        if not self._waiting or self._n_open >= self.limits.running:
            return
        for entry in sorted(self._waiting, key=self._turn):
            if self._n_open >= self.limits.running:
                break
            if self._reserve(entry):
                self._open(entry)
            elif self._first_come(entry):
                break  # smaller ones behind it would take its pages for ever

    def _reserve(self, entry: Entry) -> bool:
        n_positions = len(entry.ids) + min(entry.max_tokens - entry.n_output, self.limits.reserve_tokens)
        if entry.phase is Phase.PAUSED:
            if entry.is_open:
                return False  # jobs still hold it
            # With no page to spare the next step that needs one would pause it again.
            if self._n_open and self.pages.pages_for(n_positions) >= self.pages.n_free:
                return False
        try:
            self.pages.grow([(entry.page_table, n_positions)])
        except OutOfPages:
            return False
        return True

    def _open(self, entry: Entry) -> None:
        self._waiting.remove(entry)
        self._n_paused -= entry.phase is Phase.PAUSED
        self._running.append(entry)
        self._prefilling.append(entry)
        self._latest = max(self._latest, entry.number)
        entry.phase, entry.is_open = Phase.PREFILL, True
        entry.prefill_end, entry.rows_sent, entry.rows_done = len(entry.ids), 0, 0
        entry.reach = self._reach(entry.mode, entry.prefill_end)
        if entry.admitted_s is None:
            entry.admitted_s = self._now_s
        self._n_open += 1
        self._opened.append(entry)

    def _has_pages(self, entry: Entry) -> bool:
        """Whether the next row has a page; if there is none left, the request admitted last makes room."""
        n_positions = len(entry.ids)
        while self.pages.pages_for(n_positions) > len(entry.page_table):
            try:
                self.pages.grow([(entry.page_table, n_positions)])
            except OutOfPages:
                if self._n_open > len(self._running):
                    return False  # jobs hold ended or paused requests: their pages come back soon
                self._pause(self._running[-1])
                if entry.phase is Phase.PAUSED:
                    return False
        return True

    def _pause(self, entry: Entry) -> None:
        self._account(self._now_s)
        self._stop(entry)
        entry.phase = Phase.PAUSED
        entry.pauses += 1
        self._n_paused += 1
        insort(self._waiting, entry, key=attrgetter("number"))
        self._release(entry)

    def _stop(self, entry: Entry) -> None:
        """Out of everything that runs; jobs in flight still hold it."""
        self._running.remove(entry)
        if entry.phase is Phase.DECODE:
            self._n_decoding -= 1
            if entry in self._ready:
                self._ready.remove(entry)
        elif entry in self._prefilling:
            self._prefilling.remove(entry)

    def _release(self, entry: Entry) -> None:
        """Give its pages back once no job holds it."""
        if not entry.is_open or entry.in_flight:
            return
        self.pages.give_back(entry.page_table)
        entry.is_open = False
        self._n_open -= 1
        self._may_admit = True
        if entry in self._opened:  # nobody has heard of it
            self._opened.remove(entry)
        else:
            self._retired.append(entry)

    def _retry_after_s(self) -> float:
        """When a place in the queue should be free: the time between the latest endings, at least 1 s."""
        return max(1.0, (self._now_s - self._endings_s[0]) / max(1, len(self._endings_s) - 1))
