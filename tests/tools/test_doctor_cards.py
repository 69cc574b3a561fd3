"""The doctor on cards and the PCI bus, as files tell of them: what is wrong, and its cure."""

import pytest
from doctor_machine import NAME, Machine, said

from rocline.tools import doctor_cards, doctor_pci
from rocline.tools.doctor_checks import GIB, Cards, System, listed, worst


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


# Cards


def test_eight_good_cards(machine):
    assert f"8 x {NAME}, gfx1100, 48.0 GiB each: cards 0-7" in said(
        doctor_cards.cards(machine.system, machine.cards(), True), "ok"
    )


def test_another_arch_is_warned_about(machine):
    text = said(doctor_cards.cards(machine.system, machine.cards(c3={"arch": "gfx1030"}), True), "warning")
    assert "card 3: gfx1030, not gfx1100" in text
    assert "not all cards are alike" in text
    assert "HIP_VISIBLE_DEVICES" in text


@pytest.mark.parametrize(("total", "is_w7900d"), [(48 * GIB, True), (48_301_604_864, True), (32 * GIB, False)])
def test_a_w7900d_is_told_by_its_memory(machine, total, is_w7900d):
    """48,301,604,864 bytes is what such a card has left with error correction on."""
    changed = {f"c{index}": {"total_bytes": total} for index in range(8)}
    check = doctor_cards.cards(machine.system, machine.cards(**changed), True)
    if is_w7900d:
        assert ("keeps a sixteenth" in said(check, "ok")) == (total < 47 * GIB)
    else:
        assert "cards 0-7: gfx1100 of less than 48.0 GiB, so no W7900D" in said(check, "warning")


def test_no_card_is_a_problem_only_for_serving_from_cards(machine):
    none = Cards(why_none="HIP: no runtime library")
    assert doctor_cards.cards(machine.system, none, False).verdict == "not applicable"
    text = said(doctor_cards.cards(machine.system, none, True), "problem")
    assert "HIP: no runtime library" in text
    assert "0000:03:00.0" in text  # what is on the bus
    assert "load the amdgpu driver" in text  # there is no /dev/kfd


def test_a_closed_kfd_is_named(machine):
    machine.write("dev/kfd", "")
    (machine.root / "dev/kfd").chmod(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor_cards.os, "access", lambda path, mode: False)  # root may open everything
        text = said(doctor_cards.cards(machine.system, Cards(why_none="no device"), True), "problem")
    assert "add this user to the groups" in text


def test_who_is_meant_to_serve_from_cards(machine, tmp_path):
    assert doctor_cards.can_serve(machine.system, Cards(), has_rocm=False)  # cards of 48 GiB, even without ROCm
    laptop = Machine(tmp_path / "laptop")
    for index in range(8):
        laptop.write(f"{laptop.folder(index)}/mem_info_vram_total", 512 << 20)
    assert not doctor_cards.can_serve(laptop.system, Cards(), has_rocm=False)
    assert doctor_cards.can_serve(laptop.system, Cards(), has_rocm=True)
    assert not doctor_cards.can_serve(System(tmp_path / "nothing"), Cards(), has_rocm=True)


# Memory of cards


def test_two_sources_that_agree(machine):
    assert "the kernel's word beside HIP's on cards 0-7" in said(doctor_cards.free_memory(machine.cards()), "ok")


def test_hip_counts_on_memory_that_is_taken(machine):
    machine.write(f"{machine.folder(5)}/mem_info_vram_used", 20 * GIB)
    text = said(doctor_cards.free_memory(machine.cards()), "problem")
    assert "card 5: free 47.9 GiB by HIP, 28.0 GiB by the kernel" in text


def test_hip_tells_of_less(machine):
    text = said(doctor_cards.free_memory(machine.cards(c2={"free_bytes": 30 * GIB})), "warning")
    assert "card 2: free 30.0 GiB by HIP, 47.9 GiB by the kernel" in text


def test_another_process_on_a_card(machine):
    machine.write("sys/class/kfd/kfd/topology/nodes/1/gpu_id", "4711")
    machine.write("sys/class/kfd/kfd/topology/nodes/1/properties", f"domain 0\nlocation_id {(16 * 2 + 3) << 8}\n")
    machine.write("sys/class/kfd/kfd/topology/nodes/0/gpu_id", "0")  # the processor
    machine.write("sys/class/kfd/kfd/proc/99/vram_4711", 3 * GIB)
    machine.write("sys/class/kfd/kfd/proc/98/vram_4711", 1 << 20)  # a desktop's
    machine.write("proc/99/comm", "python3")
    check = doctor_cards.other_processes(machine.system, machine.cards())
    assert "python3 (99) holds 3.0 GiB of card 2" in said(check, "warning")
    assert check.values["processes"] == [{"pid": 99, "name": "python3", "card": 2, "bytes": 3 * GIB}]


def test_no_other_process(machine):
    (machine.root / "sys/class/kfd/kfd/proc").mkdir(parents=True)
    assert said(doctor_cards.other_processes(machine.system, machine.cards()), "ok") == "none -> "


# PCI


def test_links_are_those_of_the_slots(machine):
    """Inside the card the link is wide whatever the slot is."""
    machine.write(f"{machine.slot(6)}/current_link_width", "4")
    check = doctor_pci.links(machine.cards())
    assert "card 6: x4 at 16 GT/s, it can do x16 at 16 GT/s -> seat the card anew" in said(check, "warning")
    assert "cards 0-5, 7: x16 at 16 GT/s" in " ".join(entry.found for entry in check.entries)
    assert check.values["cards"][6]["now"] == {"width": 4, "gt_per_s": 16.0}


def test_a_slow_link(machine):
    machine.write(f"{machine.slot(0)}/current_link_speed", "2.5 GT/s PCIe")
    assert "card 0: x16 at 2.5 GT/s" in said(doctor_pci.links(machine.cards()), "warning")


def test_settings_that_copies_like(machine):
    check = doctor_pci.settings(machine.system, machine.cards())
    text = said(check, "ok")
    assert "large BAR" in text
    assert "(iommu=pt)" in text
    assert "secret" not in str(check.as_json())  # of the kernel's command line only what is about the IOMMU


def test_a_small_bar(machine):
    machine.write(f"{machine.folder(1)}/resource", f"{1 << 32:#x} {(1 << 32) + (256 << 20) - 1:#x} 0x14220c")
    text = said(doctor_pci.settings(machine.system, machine.cards()), "warning")
    assert "card 1: the bus shows 256 MiB of 48.0 GiB -> switch on Above 4G Decoding" in text


def test_an_iommu_that_translates(machine):
    machine.write(f"{machine.folder(4)}/iommu_group/type", "DMA-FQ")
    machine.write("proc/cmdline", "quiet")
    text = said(doctor_pci.settings(machine.system, machine.cards()), "warning")
    assert "card 4: addresses go through the IOMMU" in text
    assert "boot with iommu=pt" in text


@pytest.mark.parametrize(("control", "redirects"), [(0b0000100, True), (0b1011001, False)])
def test_acs_of_the_bridges(machine, control, redirects):
    """Its registers are the second in the list, as on real bridges."""
    space = bytearray(4096)
    space[256:260] = (0x0001 | 1 << 16 | 0x140 << 20).to_bytes(4, "little")
    space[0x140:0x144] = (doctor_pci.ACS_CAPABILITY | 1 << 16).to_bytes(4, "little")
    space[0x146:0x148] = control.to_bytes(2, "little")
    for index in range(8):
        for n in (1, 2, 3):
            machine.write(f"{machine.folder(index).rsplit('/', n)[0]}/config", bytes(space))
    check = doctor_pci.settings(machine.system, machine.cards())
    if redirects:
        assert "ACS redirects copies between cards at 0000:00:00.1" in said(check, "warning")
    else:
        assert "no bridge redirects copies" in said(check, "ok")


# The words


def test_listed_and_worst():
    assert listed([3]) == "card 3"
    assert listed([0, 1, 2, 5, 7, 6]) == "cards 0-2, 5-7"
    assert worst([]) == "not applicable"
    assert worst(["ok", "problem", "warning"]) == "problem"
