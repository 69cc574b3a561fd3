"""One card under watch: minima, the floor, a card that goes, and counters that stand still."""

import pytest
from fake_sysfs import GIB, FakeSysfs

from rocline.pipeline.card_watch import HIP_S, MOVED_BYTES, STILL_READINGS, CardWatch, Least
from rocline.pipeline.sysfs_cards import cards

TOTAL = 48 * GIB


class Watched:
    """A card with its watch, and what the watch has told."""

    def __init__(self, sysfs, floor_gib=0.0, hip_free=None):
        self.card, self.alarms = sysfs.cards[-1], []
        found = next(card for card in cards(sysfs.root) if card.pci_id == self.card.pci_id)
        self.watch = CardWatch(found, int(floor_gib * GIB), self.alarms.append, hip_free)

    def look(self, at_s, free_gib=None):
        if free_gib is not None:
            self.card.use(TOTAL - free_gib * GIB)
        return self.watch.look(at_s)


@pytest.fixture
def sysfs(tmp_path):
    return FakeSysfs(tmp_path / "sys")


@pytest.fixture
def watched(sysfs):
    sysfs.add(total_bytes=TOTAL)
    return Watched(sysfs, floor_gib=1.5)


def test_a_look(watched):
    look = watched.look(3.0, 2)
    assert (look.free_bytes, look.used_bytes, look.total_bytes) == (2 * GIB, 46 * GIB, TOTAL)
    assert (look.hip_free_bytes, look.frozen, look.error) == (None, False, "")
    assert (look.sensors.power_w, look.sensors.junction_c) == (17, 34)


def test_the_minimum_and_what_a_look_every_5_s_would_have_seen(watched):
    """A dip shorter than 5 s is what such a sampler misses; a late look stands for the one that was due."""
    for at_s, free_gib in ((0, 9), (2.4, 3), (2.5, 9), (5.2, 7), (5.3, 6), (9.9, 5), (16, 7.5), (19, 2), (20, 8)):
        watched.look(at_s, free_gib)
    assert watched.watch.least == Least(2 * GIB, 19)
    assert watched.watch.coarse_least == Least(7 * GIB, 5.2)
    watched.look(20.1, 2)  # as low again: the first counts
    assert watched.watch.least == Least(2 * GIB, 19)
    assert not watched.watch.has_failed
    assert watched.alarms == []


def test_each_fall_below_the_floor_is_told_once(watched):
    for at_s, free_gib in ((0, 1.5), (1, 1.4), (1.1, 1.2), (1.2, 1.6), (1.3, 1.3), (1.4, 1.6), (2.4, 1.6), (2.5, 1.0)):
        watched.look(at_s, free_gib)
    assert [alarm.split(";")[0] for alarm in watched.alarms] == [
        "0000:03:00.0 has 1.40 GiB free, the floor is 1.50",
        "0000:03:00.0 has 1.00 GiB free, the floor is 1.50",
    ]
    assert watched.watch.n_below == 4
    assert watched.watch.has_failed


def test_a_card_that_goes_and_comes_back(watched):
    watched.look(0, 5)
    watched.card.remove("mem_info_vram_used")
    looks = [watched.look(at_s) for at_s in (0.1, 0.2)]
    assert [look.free_bytes for look in looks] == [None, None]
    assert "No such file or directory" in looks[0].error
    watched.look(0.3, 4)
    (alarm,) = watched.alarms
    assert alarm.startswith("0000:03:00.0 cannot be read: No such file or directory (")
    assert (watched.watch.n_looks, watched.watch.n_failed, watched.watch.least) == (4, 2, Least(4 * GIB, 0.3))
    assert watched.watch.has_failed


def test_a_look_that_finds_nothing_new_is_the_last_one(watched):
    looks = [watched.look(at_s, free_gib) for at_s, free_gib in ((0, 5), (0.1, None), (0.2, 4), (0.3, 4), (1.0, None))]
    assert looks[1] is looks[0]
    assert looks[2].free_bytes == 4 * GIB
    assert looks[3] is looks[2]
    assert looks[4] is not looks[3]  # the sensors are read
    assert (watched.watch.n_looks, watched.watch.least) == (5, Least(4 * GIB, 0.2))


def test_sensors_are_read_once_a_second(watched):
    watched.look(0, 5)
    watched.card.write("hwmon/hwmon4/power1_average", 241_000_000)
    assert watched.look(0.9).sensors.power_w == 17
    assert watched.look(1.0).sensors.power_w == 241
    watched.card.write("hwmon/hwmon4/power1_average", 100_000_000)
    watched.card.throttle(1 << 33)
    watched.card.write("ras/umc_err_count", "ue: 0\nce: 2")
    assert watched.look(2.0).sensors.throttle == "temperature"
    watched.card.throttle(0)
    watched.look(3.0)
    assert watched.watch.highs == {"power_w": 241, "junction_c": 34, "memory_c": 41}
    assert watched.watch.throttled == {"temperature": 1}
    assert watched.watch.sensors.ecc_corrected == 2


# HIP's word


def test_free_is_the_less_of_what_sysfs_and_hip_say(sysfs):
    hip = [3 * GIB]
    sysfs.add(total_bytes=TOTAL)
    watched = Watched(sysfs, hip_free=lambda: hip[0])
    assert watched.look(0, 5).free_bytes == 3 * GIB
    hip[0] = 7 * GIB
    assert (watched.look(1.0).free_bytes, watched.look(1).hip_free_bytes) == (5 * GIB, 7 * GIB)


class Hip:
    """Free bytes as HIP says, and how often it was asked."""

    def __init__(self, free_bytes):
        self.free_bytes, self.n_asked = free_bytes, 0

    def __call__(self):
        self.n_asked += 1
        return self.free_bytes


@pytest.fixture
def hip():
    return Hip(20 * GIB)


def test_hip_is_asked_once_a_second_while_nothing_moves(sysfs, hip):
    sysfs.add(total_bytes=TOTAL)
    watched = Watched(sysfs, hip_free=hip)
    for tick in range(101):
        watched.look(tick / 10, 20)
    assert 11 <= hip.n_asked <= 12
    assert watched.watch.n_looks == 101


def test_hip_is_asked_at_once_where_sysfs_moves_and_at_the_look_after(sysfs, hip):
    sysfs.add(total_bytes=TOTAL)
    watched, asked = Watched(sysfs, hip_free=hip), []
    for at_s, free_gib in ((0, 20), (0.1, 20), (0.2, 20), (0.3, 19), (0.4, 19), (0.5, 19), (0.6, 20), (0.7, 18)):
        before = hip.n_asked
        watched.look(at_s, free_gib)
        asked.append(hip.n_asked - before)
    assert asked == [1, 1, 0, 1, 1, 0, 1, 1]


def test_an_older_answer_of_hip_never_holds_the_free_memory_back(sysfs, hip, rng):
    """Whatever both see, each look has the less of what both say at its moment."""
    sysfs.add(total_bytes=TOTAL)
    watched, free_gib, at_s = Watched(sysfs, hip_free=hip), 20, 0.0
    for _ in range(300):
        if rng.random() < 0.3:
            free_gib = int(rng.integers(1, 40))
        hip.free_bytes = free_gib * GIB - int(free_gib % 3 - 1)  # less than sysfs says, the same, more
        at_s += float(rng.exponential(0.1))
        assert watched.look(at_s, free_gib).free_bytes == min(free_gib * GIB, hip.free_bytes)


def test_what_hip_alone_sees_is_seen_within_a_second(sysfs, hip):
    sysfs.add(total_bytes=TOTAL)
    watched = Watched(sysfs, floor_gib=1.5, hip_free=hip)
    for tick in range(6):
        watched.look(tick / 10, 20)
    hip.free_bytes = GIB
    seen = next(at_s for tick in range(6, 100) if watched.look(at_s := tick / 10).free_bytes == GIB)
    assert seen <= 0.5 + HIP_S
    assert watched.watch.least == Least(GIB, seen)
    assert "1.00 GiB free, the floor is 1.50" in watched.alarms[0]


def test_hip_that_does_not_answer_is_asked_at_every_look(sysfs, hip):
    sysfs.add(total_bytes=TOTAL)
    watched = Watched(sysfs, hip_free=lambda: hip() and 1 // 0)
    assert [watched.look(tick / 10, 5).hip_free_bytes for tick in range(5)] == [None] * 5
    assert hip.n_asked == 5


def test_hip_may_fail(sysfs):
    sysfs.add(total_bytes=TOTAL)
    watched = Watched(sysfs, hip_free=lambda: 1 // 0)
    look = watched.look(0, 5)
    assert (look.free_bytes, look.hip_free_bytes, watched.alarms) == (5 * GIB, None, [])


# Counters that stand still


def run(watched, seconds, busy=50, power=None, every_s=1.0, start_s=0.0):
    """Looks at a card whose load and power are these, power by the second; whether the last one was frozen."""
    at_s, frozen = start_s, False
    while at_s < start_s + seconds:
        watched.card.write("gpu_busy_percent", busy)
        watched.card.write("hwmon/hwmon4/power1_average", int((power(at_s) if power else 200) * 1e6))
        frozen = watched.look(at_s).frozen
        at_s += every_s
    return frozen


def test_a_card_at_work_on_which_nothing_changes_is_frozen(watched):
    watched.look(0, 5)
    assert not run(watched, STILL_READINGS, start_s=1)
    assert run(watched, 3, start_s=STILL_READINGS + 1)
    (alarm,) = watched.alarms
    assert alarm == (
        "0000:03:00.0: its counters stand still, at 50 % load nothing at all has changed in 30 readings; "
        "its figures mean nothing"
    )
    assert watched.watch.has_failed
    assert not run(watched, 3, power=lambda at_s: at_s, start_s=100)  # they move again


@pytest.mark.parametrize(
    "how",
    [
        {"busy": 0},  # idle
        {"power": lambda at_s: 240 + at_s % 2},  # the server allocates nothing, the card works
    ],
)
def test_memory_that_stays_the_same_is_not_frozen(watched, how):
    watched.look(0, 5)
    assert not run(watched, 3 * STILL_READINGS, start_s=1, **how)
    assert watched.alarms == []


def test_a_card_that_does_not_say_what_it_does_is_not_judged(sysfs):
    sysfs.add(total_bytes=TOTAL, without=["hwmon/hwmon4/freq1_input"])
    watched = Watched(sysfs)
    assert not run(watched, 3 * STILL_READINGS)


def test_memory_that_moves_for_hip_alone_is_frozen(sysfs):
    hip = [20 * GIB]
    sysfs.add(total_bytes=TOTAL)
    watched = Watched(sysfs, hip_free=lambda: hip[0])
    for at_s in (0.0, 0.1, 0.2):
        watched.look(at_s, 20)
    hip[0] -= MOVED_BYTES + 1
    # Seen apart at 1.1, when HIP is asked again, and at every look from then on.
    assert [watched.look(at_s).frozen for at_s in (0.3, 1.1, 6.0, 6.1)] == [False, False, False, True]
    assert "HIP's free memory moves" in watched.alarms[0]
    assert not watched.look(6.2, 19.5).frozen  # it moved: late, but it does
    assert not watched.look(20).frozen
    assert len(watched.alarms) == 1


def test_memory_that_moves_a_little_or_for_a_moment_is_not_frozen(sysfs):
    hip = [20 * GIB]
    sysfs.add(total_bytes=TOTAL)
    watched = Watched(sysfs, hip_free=lambda: hip[0])
    watched.look(0, 20)
    for at_s in range(1, 100):
        hip[0] = 20 * GIB - (GIB if at_s % 4 == 0 else MOVED_BYTES if at_s % 2 else 0)
        assert not watched.look(float(at_s)).frozen
    assert watched.alarms == []
