"""The schedule in the cases it is made for: who is admitted, what runs next, who makes room."""

import pytest
from schedule_cases import BIG, Stages

from rocline.engine.handoff import RowKind
from rocline.pipeline.request import Phase, QueueFull, TooLong
from rocline.pipeline.schedule import MAX_STEP_ROWS, Entry

# Admission


def test_the_queue_is_exact_at_its_boundary():
    """B15: what starts at once does not count as waiting; one more than may wait is told when to come again."""
    stages = Stages(running=2, queue=1)
    first, second, third = (stages.add(4) for _ in range(3))
    assert [entry.phase for entry in (first, second, third)] == [Phase.PREFILL, Phase.PREFILL, Phase.QUEUED]
    with pytest.raises(QueueFull, match="1 requests are waiting already"):
        stages.add(4)
    stages.pump()
    stages.finish()
    assert third.phase is Phase.QUEUED
    stages.pump()
    assert third.phase is Phase.PREFILL
    assert stages.add(4).phase is Phase.QUEUED
    stages.run_to_the_end()


def test_without_a_queue_what_can_start_is_taken():
    stages = Stages(running=1, queue=0)
    stages.add(4)
    with pytest.raises(QueueFull):
        stages.add(4)
    stages.run_to_the_end()
    assert stages.add(4).phase is Phase.PREFILL


def test_retry_after_is_the_time_between_endings():
    stages = Stages(running=1, queue=0)
    stages.add(1)
    with pytest.raises(QueueFull) as refused:
        stages.add(1)
    assert refused.value.retry_after_s == 1
    for _ in range(30):
        stages.pump()
        stages.now_s += 12
        stages.pump()
        stages.finish()
        stages.add(1)
    with pytest.raises(QueueFull) as refused:
        stages.add(1)
    assert refused.value.retry_after_s == pytest.approx(1)


def test_what_all_pages_together_cannot_hold_is_refused():
    stages = Stages(n_pages=4)
    with pytest.raises(TooLong, match=r"20 prompt tokens and max_tokens 13 need 5 pages; there are 4"):
        stages.add(20, 13)
    stages.add(20, 12)
    stages.run_to_the_end()


def test_a_smaller_request_may_pass_one_that_does_not_fit_until_that_has_aged():
    stages = Stages(n_pages=5, running=4, queue=9)
    stages.add(15, 16)
    large = stages.add(20, 1)
    assert large.phase is Phase.QUEUED
    small = stages.add(4)
    assert small.phase is Phase.PREFILL
    stages.now_s += 9
    assert stages.add(4).phase is Phase.PREFILL
    stages.schedule.end(small)
    stages.now_s += 2
    behind = stages.add(4)
    assert behind.phase is Phase.QUEUED  # though it would fit
    stages.schedule.end(large)
    stages.pump()
    assert behind.phase is Phase.PREFILL
    stages.run_to_the_end()


# Chunks


def test_chunks_follow_each_other_without_a_barrier():
    stages = Stages(inflight_chunks=3)
    entry = stages.add(18)
    jobs = stages.pump()
    assert [(job.kind, job.spans[0].start, job.n_rows) for job in jobs] == [
        (RowKind.PREFILL, 0, 5),
        (RowKind.PREFILL, 5, 5),
        (RowKind.PREFILL, 10, 5),
    ]
    assert entry.in_flight == 3
    stages.finish()
    assert [job.n_rows for job in stages.pump()] == [3]
    assert str(jobs[1]) == "prefill job 2 (sequence: rows 0: 5..9)"


def test_the_shortest_remaining_prefill_goes_first():
    stages = Stages(inflight_chunks=1, running=4)
    long, short, middle = stages.add(30), stages.add(4), stages.add(12)
    order = []
    while jobs := stages.pump():
        order.append(jobs[0].entries[0])
        stages.finish()
    assert order == [short, middle, middle, middle, *[long] * 6]


def test_chunks_shrink_while_anything_decodes_and_fewer_are_in_flight():
    stages = Stages(chunk_rows=5, mixed_chunk_rows=3, inflight_chunks=9, mixed_inflight_chunks=2)
    decoding = stages.add(2, max_tokens=9)
    stages.pump()
    stages.finish()
    stages.add(40)
    step, *chunks = stages.pump()
    assert step.is_step
    assert [chunk.n_rows for chunk in chunks] == [3, 3]
    stages.schedule.end(decoding)
    assert [chunk.n_rows for chunk in stages.pump()] == [5] * 6 + [4]


def test_long_prefills_join_two_mixed_chunks_where_no_layer_gets_slower_than_the_last_chunk_s():
    stages = Stages(chunk_rows=1024, mixed_chunk_rows=256, inflight_chunks=1, mixed_history=100_000)
    stages.add(1, max_tokens=9999)
    stages.pump()
    stages.finish()
    long = stages.add(100_000)
    rows = {}
    while long.phase is Phase.PREFILL:
        for job in stages.pump():
            if not job.is_step:
                rows[job.spans[0].start] = job.n_rows
        stages.finish()
    assert sum(rows.values()) == 100_000
    rows.popitem()  # what was left
    assert all(n_rows == 512 for start, n_rows in rows.items() if start < 50_000)
    assert all(256 <= n_rows <= max(256, 256 * 100_000 / start) for start, n_rows in rows.items() if start > 50_000)
    assert all(n_rows == 256 for start, n_rows in rows.items() if start >= 100_000 - 16 * 256)
    assert {320, 384, 448} < set(rows.values())


def served_one_by_one(rng, **limits):
    """(stages, request served or None) of 400 seconds, in chunks of a second; short requests keep coming."""
    stages = Stages(inflight_chunks=1, ageing_s=10, queue=BIG, **limits)
    for second in range(400):
        if second < 300 and rng.random() < 0.7:
            stages.add(int(rng.choice([2, 5, 11, 60])))
        jobs = stages.pump()
        yield stages, jobs[0].entries[0] if jobs else None
        stages.now_s += 1
        if jobs:
            stages.finish()


def test_no_request_loses_more_than_ageing_s_to_later_ones(rng):
    lost_s = {}
    for stages, served in served_one_by_one(rng, running=BIG):
        for entry in stages.entries:
            if served and entry.phase is not Phase.ENDED and entry.number < served.number:
                lost_s[entry] = lost_s.get(entry, 0) + 1
    assert max(lost_s.values()) == 10
    stages.run_to_the_end()


def test_no_later_request_is_admitted_before_one_that_waited_ageing_s_for_later_ones(rng):
    lost_s, admitted = {}, set()
    for stages, _ in served_one_by_one(rng, running=2):
        waiting = [entry for entry in stages.entries if entry.phase is Phase.QUEUED]
        for entry in stages.opened.keys() - admitted:
            assert all(lost_s.get(other, 0) < 10 for other in waiting if other.number < entry.number)
        admitted |= stages.opened.keys()
        for entry in waiting:
            lost_s[entry] = lost_s.get(entry, 0) + any(entry.number < other.number for other in stages.opened)
    assert max(lost_s.values()) >= 10
    stages.run_to_the_end()


def test_every_prompt_row_s_logits_come_once_over_a_pause():
    stages = Stages(n_pages=4, chunk_rows=5, inflight_chunks=2, reserve_tokens=1)
    stages.add(6, max_tokens=26)
    stages.pump()
    stages.finish()
    newer = stages.add(14, max_tokens=2, mode="full", all_logits=True)
    positions = []
    while newer.phase is not Phase.ENDED:
        for job in stages.pump():
            if newer in job.entries and not job.is_step:
                (span,) = job.spans
                positions += range(max(span.start, span.logits_from), span.end)
        # Two of its chunks stay on their way until the older request needs their pages.
        stages.finish(next((job for job in stages.jobs if job.is_step), None) if not newer.pauses else None)
    assert newer.pauses == 1
    assert sorted(positions) == list(range(14))
    stages.run_to_the_end()


# Steps


def decoding(n_requests, **limits):
    """Stages on which n_requests decode and none is in a step; each request has 1,000 tokens to go."""
    stages = Stages(running=BIG, inflight_chunks=n_requests, mixed_inflight_chunks=n_requests, **limits)
    for _ in range(n_requests):
        stages.add(1, 1000)
    for job in stages.pump():
        stages.finish(job)
    return stages


@pytest.mark.parametrize(
    ("n_requests", "n_groups", "sizes"),
    [
        (1, 1, [1]),
        (8, 8, [1] * 8),
        (8, 1, [8]),
        (9, 4, [3, 2, 2, 2]),
        (9, 8, [2, 1, 1, 1, 1, 1, 1, 1]),
        (3, 8, [1, 1, 1]),
        (64, 8, [8] * 8),
        (70, 1, [64]),
    ],
)
def test_ready_requests_are_spread_evenly_over_the_groups(n_requests, n_groups, sizes):
    stages = decoding(n_requests, n_groups=lambda n_requests: n_groups)
    assert [job.n_rows for job in stages.pump()] == sizes
    assert max(sizes) <= MAX_STEP_ROWS


def test_groups_even_out_when_requests_leave_and_join():
    stages = decoding(4, n_groups=lambda n_requests: 4)
    for entry in stages.entries[:2]:
        stages.schedule.end(entry)
    stages.pump()
    stages = decoding(6, n_groups=lambda n_requests: 3)
    first, _, third = stages.pump()
    for entry in third.entries:
        stages.schedule.end(entry)
    stages.finish(third)
    stages.finish(first)
    assert sorted(job.n_rows for job in stages.pump()) == [1, 1]  # two places for the two that are ready


def test_the_longest_ready_goes_first_and_steps_before_chunks():
    stages = decoding(3, n_groups=lambda n_requests: 1, chunk_rows=2)
    (step,) = stages.pump()
    assert step.entries == tuple(stages.entries)
    stages.schedule.end(stages.entries[0])
    late = stages.add(2, 1000)
    (chunk,) = stages.pump()
    stages.finish(chunk)
    assert stages.pump() == []  # the one place is taken
    stages.finish(step)
    (step,) = stages.pump()
    assert step.entries == (late, *stages.entries[1:3])
    stages.add(2)
    stages.finish(step)
    assert [job.is_step for job in stages.pump()] == [True, False]


# Pauses


def test_the_request_admitted_last_makes_room_and_resumes_with_its_output():
    stages = Stages(n_pages=6, running=4)
    oldest, middle, newest = (stages.add(8, max_tokens=24) for _ in range(3))
    paused = {}
    while any(entry.phase is not Phase.ENDED for entry in stages.entries):
        stages.pump()
        for entry in stages.entries:
            if entry.phase is Phase.PAUSED:
                paused.setdefault(entry, entry.n_output)
        stages.finish()
    stages.check_all_over()
    assert oldest.pauses == 0
    assert newest.pauses >= 1
    assert paused[newest] >= 1
    for entry in (oldest, middle, newest):
        assert list(entry.ids) == list(range(32))
    # What had come before the pause was run again as part of the prompt.
    assert stages.n_prefilled[oldest] == 8
    assert stages.n_prefilled[newest] >= 8 + 8 + paused[newest]


def test_a_paused_request_waits_ahead_of_newer_ones_and_for_a_page_to_spare():
    stages = Stages(n_pages=4, running=4, queue=9)
    older, paused = stages.add(8, 24), stages.add(8, 20)
    while not paused.pauses:
        stages.pump()
        stages.finish()
    newer = stages.add(2)
    stages.pump()
    assert newer.phase is Phase.QUEUED
    while paused.phase is Phase.PAUSED:
        assert newer.phase is Phase.QUEUED
        stages.finish()
        stages.pump()
    assert older.phase is Phase.ENDED
    assert paused.admitted_s == 100.0
    stages.run_to_the_end()


@pytest.mark.parametrize(("n_output", "leaves_one_to_spare"), [(8, True), (16, False)])
def test_a_paused_request_resumes_with_a_page_to_spare_or_alone(n_output, leaves_one_to_spare):
    stages = Stages(n_pages=6, running=4)
    first, second, paused = stages.add(4, 44), stages.add(8, n_output), stages.add(17, 7)
    while not paused.pauses:
        stages.pump()
        stages.finish()
    while paused.phase is Phase.PAUSED:
        stages.pump()
        if paused.phase is Phase.PAUSED:
            stages.finish()
    assert second.phase is Phase.ENDED
    assert (first.phase is Phase.DECODE) == leaves_one_to_spare
    stages.run_to_the_end()
    assert paused.pauses == 1


def test_a_paused_request_that_needs_all_pages_resumes_alone():
    stages = Stages(n_pages=5)
    stages.add(2, 20)
    large = stages.add(26, 14)
    stages.run_to_the_end()
    assert large.pauses == 1
    assert large.n_output == 14


def test_requests_that_fill_all_pages_end_one_after_the_other():
    stages = Stages(n_pages=5, running=4, queue=9, n_groups=lambda n_requests: 2)
    for _ in range(6):
        stages.add(8, max_tokens=32)
    stages.run_to_the_end()
    assert sum(entry.pauses for entry in stages.entries) > 0


# The rules of the caller


def test_a_cancelled_request_s_pages_come_back_with_its_last_job():
    stages = Stages(n_pages=4)
    entry = stages.add(20)
    jobs = stages.pump()
    stages.schedule.end(entry)
    stages.schedule.end(entry)
    assert stages.pump() == []
    for job in jobs[:-1]:
        stages.finish(job)
        stages.pump()
        assert entry in stages.opened
        assert stages.pages.n_free < 4
    stages.finish(jobs[-1])
    assert stages.pages.n_free == 4
    stages.schedule.commit(entry, 7)  # of a row that was on its way: nobody wants it
    assert entry.n_output == 0
    stages.run_to_the_end()


def test_a_request_that_ends_unseen_is_never_opened():
    stages = Stages()
    entry = stages.add(3)
    stages.schedule.end(entry)
    assert stages.schedule.opened() == stages.schedule.retired() == []
    assert stages.schedule.is_idle


def test_tokens_at_the_wrong_moment_are_refused():
    stages = Stages(chunk_rows=2)
    entry = stages.add(4, max_tokens=3)
    first, last = stages.pump()
    stages.finish(first)
    with pytest.raises(RuntimeError, match="has neither a token nor an end"):
        stages.schedule.done(last)
    with pytest.raises(RuntimeError, match="commit once a row, before the job is done"):
        stages.schedule.commit(entry, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt_ids": [], "max_tokens": 1}, "0 prompt tokens"),
        ({"prompt_ids": [1], "max_tokens": 0}, "max_tokens 0"),
        ({"prompt_ids": [1], "max_tokens": 1, "all_logits": True}, 'only "full"'),
    ],
)
def test_what_is_no_request_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Entry(0, **options)
