"""The schedule under any sequence of events, against simple invariants."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from schedule_cases import PAGE, Stages

from rocline.pipeline.request import Phase, QueueFull, TooLong


class AnyEvents(RuleBasedStateMachine):
    """Requests come, tokens come, requests are cancelled, pages run out: in any order."""

    @initialize(
        n_pages=st.integers(3, 12),
        running=st.integers(1, 4),
        queue=st.integers(0, 3),
        n_groups=st.integers(1, 4),
        inflight_chunks=st.integers(1, 4),
    )
    def begin(self, n_pages, n_groups, **limits):
        self.stages = Stages(n_pages, n_groups=lambda n_requests: n_groups, **limits)
        self.n_groups = n_groups

    @rule(n_prompt=st.integers(1, 40), max_tokens=st.integers(1, 40), all_logits=st.booleans())
    def add(self, n_prompt, max_tokens, all_logits):
        stages, schedule = self.stages, self.stages.schedule
        fits_ever = -(-(n_prompt + max_tokens) // PAGE) <= stages.pages.n_pages
        held = [entry for entry in stages.entries if entry.is_open]
        waiting = [entry for entry in stages.entries if entry.phase in (Phase.QUEUED, Phase.PAUSED)]
        n_queued = schedule.queued
        has_place = len(held) < stages.limits.running
        fits_now = -(-(n_prompt + min(max_tokens, 4)) // PAGE) <= stages.pages.n_free
        try:
            entry = stages.add(n_prompt, max_tokens, mode="full" if all_logits else "halo", all_logits=all_logits)
        except TooLong:
            assert not fits_ever
        except QueueFull:
            assert fits_ever
            assert n_queued == stages.limits.queue == schedule.queued
            assert waiting or not (has_place and fits_now)  # what can start at once is taken
        else:
            assert fits_ever
            assert schedule.queued <= stages.limits.queue
            if not waiting:
                assert (entry.phase is Phase.PREFILL) == (has_place and fits_now)

    @rule()
    def pump(self):
        self.stages.pump()

    @precondition(lambda self: self.stages.jobs)
    @rule(data=st.data())
    def finish(self, data):
        """Any job that none of the same sequence is ahead of: steps overtake chunks."""
        seen, first = set(), []
        for job in self.stages.jobs:
            if not seen & set(job.entries):
                first.append(job)
            seen |= set(job.entries)
        self.stages.finish(data.draw(st.sampled_from(first), label="job"))

    @precondition(lambda self: self.stages.entries)
    @rule(data=st.data(), again=st.booleans())
    def end(self, data, again):
        entry = data.draw(st.sampled_from(self.stages.entries), label="entry")
        for _ in range(1 + again):
            self.stages.schedule.end(entry)
            assert entry.phase is Phase.ENDED

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds):
        self.stages.now_s += seconds

    @invariant()
    def all_is_accounted_for(self):
        stages, schedule = self.stages, self.stages.schedule
        entries = stages.entries
        tables = [page for entry in entries for page in entry.page_table]
        assert len(set(tables)) == len(tables)
        assert len(tables) + stages.pages.n_free == stages.pages.n_pages
        assert sum(entry.is_open for entry in entries) <= stages.limits.running
        assert all(bool(entry.page_table) == entry.is_open for entry in entries)
        for phase, n_entries in (
            (Phase.QUEUED, schedule.queued),
            (Phase.PREFILL, schedule.prefilling),
            (Phase.DECODE, schedule.decoding),
            (Phase.PAUSED, schedule.paused),
        ):
            assert n_entries == sum(entry.phase is phase for entry in entries)
        for entry in entries:
            assert entry.in_flight == sum(entry in job.entries for job in stages.jobs)
            assert list(entry.ids) == list(range(len(entry.ids)))  # no token lost or twice
        steps = [job for job in stages.jobs if job.is_step]
        assert len(steps) <= self.n_groups
        assert len(stages.jobs) - len(steps) <= stages.limits.inflight_chunks

    def teardown(self):
        if hasattr(self, "stages"):
            self.stages.run_to_the_end()


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
