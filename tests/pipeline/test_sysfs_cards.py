"""Cards in a made-up sysfs: which are found, what is read of them, and what is missing."""

import os
from collections import Counter

import pytest
from fake_sysfs import GIB, SENSORS, FakeSysfs

from rocline.pipeline.sysfs_cards import Sensors, card_at, cards

NOTHING = Sensors(None, None, None, None, None, None, None, None, None)


@pytest.fixture
def sysfs(tmp_path):
    return FakeSysfs(tmp_path / "sys")


def test_cards_of_amdgpu_are_found_by_pci_id(sysfs):
    sysfs.add("0000:83:00.0", used_bytes=2 * GIB)
    sysfs.add("0000:03:00.0", used_bytes=5, total_bytes=10)
    sysfs.add("0000:00:02.0", driver="i915")
    sysfs.add("0000:04:00.0", without=["mem_info_vram_used"])  # a driver too old to tell
    found = cards(sysfs.root)
    assert [(card.pci_id, card.name) for card in found] == [("0000:03:00.0", "card1"), ("0000:83:00.0", "card0")]
    assert [card.memory() for card in found] == [(5, 10), (2 * GIB, 48 * GIB)]


def test_a_machine_without_cards(tmp_path):
    assert cards(tmp_path / "nothing") == []


def test_sensors(sysfs):
    card = sysfs.add()
    card.write("gpu_busy_percent", 99)
    card.write("ras/umc_err_count", "ue: 1\nce: 23\nde: 4")
    card.throttle(0)
    (found,) = cards(sysfs.root)
    assert found.sensors() == Sensors(99, 17, 34, 41, 32, 96, "none", 23, 1)


def test_missing_files_are_no_figures(sysfs):
    sysfs.add(without=list(SENSORS))
    (found,) = cards(sysfs.root)
    assert found.sensors() == NOTHING


def test_what_else_kernels_call_it(sysfs):
    hwmon = "hwmon/hwmon4"
    card = sysfs.add(without=[f"{hwmon}/power1_average", f"{hwmon}/freq1_input", f"{hwmon}/freq2_label"])
    card.write(f"{hwmon}/power1_input", 241_000_000)
    card.write("pp_dpm_sclk", "0: 500Mhz\n1: 1895Mhz *\n2: 2565Mhz")
    card.write("pp_dpm_mclk", "0: 96Mhz\n1: 1124Mhz")  # none is marked
    sensors = cards(sysfs.root)[0].sensors()
    assert (sensors.power_w, sensors.sclk_mhz, sensors.mclk_mhz) == (241, 1895, None)


@pytest.mark.parametrize(
    ("bits", "version", "said"),
    [
        (1, 3, "power"),
        (1 << 15 | 1 << 32 | 1 << 47, 3, "power+temperature"),
        (1 << 16 | 1 << 57, 3, "current+other"),
        ((1 << 64) - 1, 3, None),  # the card does not say
        (1, 2, None),  # another layout
    ],
)
def test_throttle_reasons(sysfs, bits, version, said):
    sysfs.add().throttle(bits, version)
    assert cards(sysfs.root)[0].sensors().throttle == said


def test_a_card_that_goes(sysfs):
    card = sysfs.add()
    (found,) = cards(sysfs.root)
    card.write("mem_info_vram_used", "")
    with pytest.raises(OSError, match="want a number"):
        found.memory()
    card.remove()
    with pytest.raises(FileNotFoundError, match="mem_info_vram_used"):
        found.memory()
    assert found.sensors() == NOTHING


def test_a_card_that_comes_back(sysfs):
    card = sysfs.add(total_bytes=48 * GIB)
    (found,) = cards(sysfs.root)
    assert found.memory() == (GIB, 48 * GIB)
    card.remove("mem_info_vram_used", "mem_info_vram_total")
    with pytest.raises(FileNotFoundError, match="mem_info_vram_used"):
        found.memory()
    card.write("mem_info_vram_total", 32 * GIB)
    card.write("mem_info_vram_used", 5)
    assert found.memory() == (5, 32 * GIB)


def test_a_look_reads_one_number_of_files_that_stay_open(sysfs, monkeypatch):
    sysfs.add().throttle(0)
    (found,) = cards(sysfs.root)
    found.memory(), found.sensors()
    calls = Counter()

    def counted(call):
        return lambda *args: calls.update([call.__name__]) or call(*args)

    for call in (os.open, os.pread):
        monkeypatch.setattr(os, call.__name__, counted(call))
    for _ in range(10):
        found.memory()
    assert calls == {"pread": 10}
    found.sensors()
    assert calls == {"pread": 18}


def test_a_card_at_a_pci_id(sysfs):
    sysfs.add("0000:0a:00.0")
    sysfs.add("0000:0b:00.1")
    sysfs.add("0000:0c:00.0")
    sysfs.add("0000:0c:00.1")
    found = cards(sysfs.root)
    assert card_at(found, "0000:0A:00.0") is found[0]
    assert card_at(found, "0000:0b:00.0") is found[1]
    assert card_at(found, "0000:0c:00.0") is None  # which of the two?
    assert card_at(found, "0001:0a:00.0") is None
