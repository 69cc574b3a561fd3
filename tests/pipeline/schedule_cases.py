"""Everything around a schedule, for its tests."""

from collections import deque
from itertools import count

from rocline.engine.handoff import Reach
from rocline.engine.pages import Pages
from rocline.pipeline.request import Phase
from rocline.pipeline.schedule import Entry, Limits, Schedule

PAGE = 8
BIG = 10**6


def reach(mode, end):
    return Reach(end, window=4, n_layers=6, first_layer=3 if mode == "halo" else 7)


def make_limits(**changes):
    given = {
        "chunk_rows": 5,
        "mixed_chunk_rows": 3,
        "inflight_chunks": 3,
        "running": 3,
        "queue": 3,
        "n_groups": lambda n_requests: n_requests,
        "reserve_tokens": 4,
        "ageing_s": 10.0,
    }
    return Limits(**(given | changes))


class Stages:
    """Everything around a schedule, checking what it gives out. A token's value is its position.

    jobs    in flight, oldest first
    opened  rows that have been sent of each sequence that the stages have open
    """

    def __init__(self, n_pages=BIG, **limits):
        self.pages = Pages(n_pages, PAGE)
        self.limits = make_limits(**limits)
        self.schedule = Schedule(self.limits, self.pages, reach)
        self.numbers = count()
        self.now_s = 100.0
        self.jobs = deque()
        self.entries = []
        self.opened = {}
        self.n_prefilled = {}  # rows of all chunks, of each entry

    def add(self, n_prompt, max_tokens=1, **options):
        entry = Entry(next(self.numbers), list(range(n_prompt)), max_tokens, **options)
        self.schedule.add(entry, self.now_s)
        self.entries.append(entry)
        return entry

    def pump(self):
        """Issue what may go, as the engine does."""
        jobs = []
        while job := self.schedule.next_job(self.now_s):
            jobs.append(job)
        for entry in self.schedule.retired():
            assert entry.in_flight == 0
            assert entry.page_table == [] or entry.is_open  # or it is back already, and to be opened again
            del self.opened[entry]
        for entry in self.schedule.opened():
            assert entry not in self.opened
            self.opened[entry] = 0
        for job in jobs:
            self.check(job)
        self.jobs += jobs
        return jobs

    def check(self, job):
        assert len(set(job.entries)) == len(job.entries) == len(job.spans)
        for entry, span in zip(job.entries, job.spans, strict=True):
            assert span.sequence == entry.number
            assert span.start == self.opened[entry]  # rows in order, none twice, none left out
            assert span.n_rows >= 1
            self.opened[entry] = span.end
            assert span.end <= len(entry.page_table) * PAGE
            if job.is_step:
                assert (span.n_rows, span.end) == (1, len(entry.ids))
                assert span.logits_from == span.start
                assert span.reach == reach("full", span.end)
                assert not any(entry in other.entries for other in self.jobs)
            else:
                assert span.reach == reach(entry.mode, entry.prefill_end)
                assert span.end <= entry.prefill_end
                assert span.n_rows <= self.limits.chunk_rows
                self.n_prefilled[entry] = self.n_prefilled.get(entry, 0) + span.n_rows

    def finish(self, job=None):
        """A job comes through: every token is committed, and requests end with their last one."""
        job = job or self.jobs[0]
        self.jobs.remove(job)
        for entry, span in zip(job.entries, job.spans, strict=True):
            if span.end == len(entry.ids) and entry.phase is not Phase.ENDED:
                self.schedule.commit(entry, len(entry.ids))
                if entry.n_output == entry.max_tokens:
                    self.schedule.end(entry)
        self.schedule.done(job)

    def run_to_the_end(self):
        for n_jobs in count():
            self.pump()
            if not self.jobs:
                break
            self.finish()
            self.now_s += 1
            assert n_jobs < 20_000, "requests keep pausing each other"
        self.check_all_over()

    def check_all_over(self):
        assert self.pump() == []
        assert self.schedule.is_idle
        assert self.opened == {}
        assert self.pages.n_free == self.pages.n_pages
        assert all(entry.phase is Phase.ENDED and entry.in_flight == 0 for entry in self.entries)
