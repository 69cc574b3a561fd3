"""The gfx1100 budget check: what it reads from machine code, and that a kernel past its budget cannot pass."""

import shutil
import subprocess

import pytest

from rocline.hip_kernels.compile import SOURCES
from rocline.hip_kernels.kernel import Kernel
from rocline.tools import kernel_budget
from rocline.tools.gfx1100 import (
    COMPILER,
    DISASSEMBLER,
    TOOLS,
    NoToolError,
    ToolError,
    analyse,
    check_tools,
    parse_loops,
    parse_notes,
    waves_per_simd,
)
from rocline.tools.kernel_budget import broken, main, measure, page, read_page, unlisted, worse

needs_clang = pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}")

NOTES = """\
amdhsa.kernels:
  - .args:
      - .address_space:  global
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .offset:         8
        .size:           4
        .value_kind:     by_value
      - .offset:         16
        .size:           4
        .value_kind:     hidden_block_count_x
    .group_segment_fixed_size: 128
    .kernarg_segment_size: 36
    .max_flat_workgroup_size: 64
    .name:           first
    .private_segment_fixed_size: 16
    .sgpr_count:     18
    .sgpr_spill_count: 2
    .vgpr_count:     54
    .vgpr_spill_count: 3
  - .args:           []
    .group_segment_fixed_size: 0
    .max_flat_workgroup_size: 32
    .name:           second
    .private_segment_fixed_size: 0
    .sgpr_count:     1
    .sgpr_spill_count: 0
    .vgpr_count:     1
    .vgpr_spill_count: 0
amdhsa.target:   amdgcn-amd-amdhsa--gfx1100
"""

# A loop at +0x8 holds another at +0x10; both have two ways back.
DISASSEMBLY = """\
0000000000001600 <first>:
\ts_load_b32 s2, s[0:1], 0x8                                 // 000000001600: F4000080 F8000008
\tv_add_nc_u32_e32 v3, v1, v3                                // 000000001608: 4A060701
\tv_exp_f32_e32 v3, v1                                       // 00000000160C: 4A060701
\tv_wmma_i32_16x16x16_iu8 v[0:7], v[33:36], v[37:40], v[25:32] neg_lo:[1,1,0]// 000000001610: CC444000 7C664B21
\tds_load_b128 v[0:3], v4                                    // 000000001618: CC444000
\tds_load_2addr_b64 v[0:3], v4 offset1:1                     // 00000000161C: CC444000
\ts_cbranch_scc1 65532                                       // 000000001620: BFA2FFEC <first+0x10>
\tds_bpermute_b32 v1, v1, v2                                 // 000000001624: CC444000
\ts_cbranch_scc1 65531                                       // 000000001628: BFA2FFEC <first+0x10>
\tglobal_load_b32 v1, v[4:5], off                            // 00000000162C: DC520000
\ts_cbranch_scc0 65523                                       // 000000001630: BFA1FFF4 <first+0x8>
\ts_branch 65520                                             // 000000001634: BFA0FFDC <first+0x8>
\ts_cbranch_scc1 1                                           // 000000001638: BFA20001 <first+0x40>
\tv_mov_b32_e32 v0, 0                                        // 00000000163C: 7E000280
\ts_endpgm                                                   // 000000001640: BFB00000
\ts_code_end                                                 // 000000001644: BF9F0000

0000000000001700 <second>:
\tv_dot4_i32_iu8 v0, v1, v2, v0 neg_lo:[1,1,0]               // 000000001700: CC164000
\ts_endpgm                                                   // 000000001708: BFB00000
"""


def test_notes():
    found = parse_notes(NOTES)
    first, second = found["first"], found["second"]
    assert (first.vgprs, first.spilled, first.scratch_bytes, first.static_lds_bytes) == (54, 5, 16, 128)
    assert (first.threads, first.arguments) == (64, ((8, True), (4, False)))
    assert (second.vgprs, second.threads, second.arguments) == (1, 32, ())


def test_loops():
    outer, inner = parse_loops(DISASSEMBLY)["first"]
    assert (outer.start, dict(outer.counts)) == (8, {"vector": 1, "slow": 1, "memory": 1, "scalar": 2})
    assert (outer.ideal_cycles, outer.issue_cycles, outer.lds_cycles, outer.cycles) == (0, 1 + 4, 0, 5)
    assert (inner.start, dict(inner.counts)) == (16, {"wmma": 1, "lds": 3, "scalar": 2})
    assert inner.lds_bytes == 16 + 16 + 4
    assert (inner.ideal_cycles, inner.issue_cycles, inner.lds_cycles, inner.cycles) == (32, 32, 18, 32)


def test_a_kernel_without_loops_is_priced_whole():
    (whole,) = parse_loops(DISASSEMBLY)["second"]
    assert (whole.start, dict(whole.counts), whole.cycles) == (-1, {"vector": 1, "scalar": 1}, 1)


@pytest.mark.parametrize(
    ("vgprs", "threads", "lds_bytes", "waves"),
    [
        (1, 32, 0, 16),
        (96, 256, 0, 16),
        (97, 32, 0, 12),  # granules of 24: 120
        (256, 32, 0, 5),
        (192, 256, 0, 8),
        (193, 256, 0, 6),  # 7 by registers, but 28 waves hold only three workgroups of 8
        (96, 256, 65536, 4),  # two workgroups
        (96, 256, 16384, 16),
        (96, 256, 16385, 14),  # granules of 1,024: seven workgroups
        (96, 64, 65536, 1),
        (96, 1024, 65536, 16),
    ],
)
def test_waves(vgprs, threads, lds_bytes, waves):
    assert waves_per_simd(vgprs, threads, lds_bytes) == waves


GOOD = """\
// Budget on gfx1100: good: 16 VGPRs, 256 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: indexes: 256 VGPRs, 0 bytes of LDS, 4 waves per SIMD, no scratch.
// Budget on gfx1100: fixed: 64 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "port.hip.h"

RL_KERNEL(64) good(float* out, const float* in, int n, rl_i64 step, float scale) {
  for (int i = 0; i < n; ++i) out[rl_tid() + i * step] = in[i] * scale + N_MORE;
}
RL_EXPORT(good)

// An array indexed by what is not known at compile time lives in memory.
RL_KERNEL(32) indexes(int* out, const int* in) {
  int v[64];
  for (int i = 0; i < 64; ++i) v[i] = in[rl_tid() + i * 32];
  rl_sync();
  out[rl_tid()] = v[in[0] & 63] + v[in[1] & 63];
}
RL_EXPORT(indexes)

#if defined(__HIP__)
RL_KERNEL(32) fixed(int* out) {
  static __attribute__((shared)) int lds[32];
  lds[rl_tid()] = out[rl_tid()];
  rl_sync();
  out[rl_tid()] = lds[31 - rl_tid()];
}
#endif
"""

SPILLS = """\
// Budget on gfx1100: spills: 256 VGPRs, 0 bytes of LDS, 4 waves per SIMD, no scratch.
#include "port.hip.h"

// More values alive at once than there are registers.
RL_KERNEL(32) spills(int* out, const int* in) {
  int v[300];
#pragma unroll
  for (int i = 0; i < 300; ++i) v[i] = in[rl_tid() + i * 32];
  rl_sync();
#pragma unroll
  for (int i = 0; i < 300; ++i) out[rl_tid() + i * 32] = v[299 - i] * v[i];
}
RL_EXPORT(spills)
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "probe.hip"
    path.write_text(GOOD)
    return path


def declare(source, name="good", arguments="PPiqf", *, threads=64, lds_bytes=256, n_more=1):
    return Kernel(source, name, arguments, threads=threads, defines={"N_MORE": n_more}, lds_bytes=lds_bytes)


def problems_of(kernel):
    (figures,) = measure([kernel])
    return [problem.removeprefix(f"{kernel}: ") for problem in broken(figures)]


@needs_clang
def test_a_good_kernel_holds_its_budget(source):
    assert problems_of(declare(source)) == []


@needs_clang
def test_spills_and_scratch_are_found(source):
    (indexes,) = problems_of(declare(source, "indexes", "PP", threads=32, lds_bytes=0))
    assert indexes.endswith("bytes of scratch a lane, want none")
    source.write_text(SPILLS)
    scratch, spilled = problems_of(declare(source, "spills", "PP", threads=32, lds_bytes=0))
    assert scratch.endswith("bytes of scratch a lane, want none")
    assert spilled.endswith("registers spilled, want none")


@needs_clang
def test_static_lds_is_found(source):
    (problem,) = problems_of(declare(source, "fixed", "P", threads=32, lds_bytes=0))
    assert problem == "128 bytes of static LDS, want all of it RL_DYN_SHARED"


@needs_clang
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"budget": ("16 VGPRs", "2 VGPRs")}, r"\d+ VGPRs, budget 2"),
        ({"budget": ("256 bytes", "255 bytes")}, "256 bytes of LDS, budget 255"),
        ({"lds_bytes": 65536, "budget": ("256 bytes", "65536 bytes")}, "1 waves per SIMD, budget 16"),
        ({"budget": ("no scratch.", "no scratch")}, "probe.hip states no budget for it"),
        ({"budget": ("good:", "better:")}, "probe.hip states no budget for it"),
        ({"threads": 32}, r"RL_KERNEL\(64\), the binding launches 32 threads"),
        ({"arguments": "PPiif"}, "arguments are 'PPiqi' in the source, 'PPiif' in the binding"),
        ({"arguments": "PPiq"}, "arguments are 'PPiqi' in the source, 'PPiq' in the binding"),
    ],
)
def test_each_broken_promise_is_found(source, change, problem):
    if "budget" in change:
        head, _, rest = GOOD.partition("\n")
        source.write_text(head.replace(*change.pop("budget")) + "\n" + rest)
    kernel = declare(source, **change)
    (figures,) = measure([kernel])
    with pytest.raises(AssertionError, match=problem):
        assert broken(figures) == []


@needs_clang
def test_code_that_does_not_compile_is_an_error(source):
    source.write_text(GOOD + "int unfinished(")
    with pytest.raises(ToolError, match=r"(?s)probe.hip.* failed:.*error: expected"):
        analyse(source, [])
    source.write_text(GOOD + "RL_DEV int f() { int unused; return 1; }\n")
    with pytest.raises(ToolError, match="unused"):
        analyse(source, [("N_MORE", 1)])


@needs_clang
def test_an_entry_point_that_is_not_there_is_an_error(source):
    with pytest.raises(ToolError, match=r"probe.hip has no such entry point, only good, indexes, fixed"):
        measure([declare(source, "absent", "P")])


def test_every_entry_point_is_listed_once(source):
    good, other = declare(source), declare(source, n_more=2)
    indexes = declare(source, "indexes", "PP")
    assert unlisted([source], [good, other, indexes]) == []
    assert unlisted([source], [good]) == ["probe.hip: indexes is exported, but no RELEASE_KERNELS has it"]
    twice = declare(source, lds_bytes=128)
    (problem,) = unlisted([source], [good, indexes, twice])
    assert problem == "probe.hip: good is listed 2 times with defines {'N_MORE': 1}; list the one with the most LDS"


@needs_clang
def test_figures_may_not_get_worse(source):
    kernel = declare(source)
    (figures,) = measure([kernel])
    accepted = read_page(page([figures]))
    assert accepted == {("good", "N_MORE=1"): figures.row}
    assert worse(figures, accepted) == []
    (problem,) = worse(figures, {("good", "N_MORE=2"): figures.row})
    assert problem == f"{kernel}: is not on the accepted page; write it anew with --page"
    row = figures.row
    for name, before in (("VGPRs", row["VGPRs"] / 1.04), ("price", row["price"] / 1.04), ("waves per SIMD", 17)):
        (problem,) = worse(figures, {figures.key: {**row, name: before}})
        assert problem.startswith(f"{kernel}: {name} {before:g} -> {row[name]:g}, worse by more than 3 %")
        better = {**row, name: row[name] / 1.02 if name != "waves per SIMD" else row[name] - 1}
        assert worse(figures, {figures.key: better}) == []


@needs_clang
def test_the_command(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernel_budget, "SOURCES", tmp_path)
    good = [declare(source)]
    monkeypatch.setattr(kernel_budget, "release_kernels", lambda: good)
    source.write_text(GOOD.partition("// An array")[0])
    written = tmp_path / "page.md"
    assert main(["--page", str(written)]) == 0
    assert "| good | N_MORE=1 |" in written.read_text()
    assert main(["--accepted", str(written)]) == 0
    out, err = capsys.readouterr()
    assert (out.strip(), err) == (written.read_text().strip(), "")

    worse_page = written.read_text().replace("| 16 | ", "| 17 | ", 1)
    assert worse_page != written.read_text()
    written.write_text(worse_page)
    assert main(["--accepted", str(written)]) == kernel_budget.EXIT_BROKEN
    assert "waves per SIMD 17 -> 16, worse by more than 3 %" in capsys.readouterr().err

    source.write_text(source.read_text().replace("16 VGPRs", "1 VGPRs"))
    assert main([]) == kernel_budget.EXIT_BROKEN
    assert "VGPRs, budget 1" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["--accepted", str(tmp_path / "absent.md")])
    assert stopped.value.code == 2


def test_without_the_compiler_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main([]) == kernel_budget.EXIT_NO_COMPILER
    assert "install them: apt-get install clang-22 lld-22 llvm-22" in capsys.readouterr().err
    with pytest.raises(NoToolError):
        check_tools()


CONTRACTS = """
#include "port.hip.h"
RL_KERNEL(32) sums(float* out, const float* x) { out[rl_tid()] = x[rl_tid()] * x[32 + rl_tid()] + x[64 + rl_tid()]; }
RL_KERNEL(32) fused(float* out, const float* x) { out[rl_tid()] = rl::fma(x[rl_tid()], x[32], x[64]); }
"""


@needs_clang
def test_port_header_alone_keeps_gfx1100_from_contracting(tmp_path):
    """No option is passed: the pragma of port.hip.h must do it, as under a hiprtc that someone else drives."""
    (tmp_path / "sums.hip").write_text(CONTRACTS)
    command = [COMPILER, "-x", "hip", "--offload-arch=gfx1100", "--cuda-device-only", "--no-gpu-bundle-output", "-O3"]
    command += [
        "-nogpuinc",
        "-nogpulib",
        f"-I{SOURCES}",
        "-c",
        str(tmp_path / "sums.hip"),
        "-o",
        str(tmp_path / "code"),
    ]
    subprocess.run(command, check=True)
    code = subprocess.check_output([DISASSEMBLER, "-d", "--mcpu=gfx1100", str(tmp_path / "code")], text=True)
    _, sums, fused = code.split(">:\n")
    assert "v_fma" in fused
    assert "v_mul_f32" in sums
    assert not any(word in sums for word in ("v_fma", "v_mad", "v_dual_fma"))
