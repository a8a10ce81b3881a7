"""The static report reads machine code rightly, and kernels stay as good as recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from k3backend.common.launch_config import LaunchConfig, ProductionShape
from k3backend.nvidia.launch_config import decode_launch as nvidia_launch
from k3backend.report import kernel_bounds
from k3backend.report.amd_code import amd_facts
from k3backend.report.chips import CHIPS
from k3backend.report.kernel_bounds import Bounds, bound_problems, bounded_numbers, load_bounds
from k3backend.report.kernel_checks import decode_problems, kv_reads, resource_problems
from k3backend.report.kernel_documents import (
    kernel_tables,
    peer_document,
    peer_table,
    with_section,
)
from k3backend.report.kernel_facts import KernelFacts, LoopFacts
from k3backend.report.kernel_report import (
    Outcome,
    _compile_quietly,
    choose,
    compile_rows,
    compile_subject,
    judge,
)
from k3backend.report.kernel_requests import TARGETS, subjects
from k3backend.report.nvidia_code import nvidia_facts
from k3backend.report.roofline import ridge_rows, tile_times
from tests.helpers.command_lines import assert_refused, run_fresh, run_here

NO_BOUNDS = Bounds()
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
SHAPE = ProductionShape("TP8 8 tokens", 12, 8)
LAUNCH = LaunchConfig(row_groups=(64, 32), tile_tokens=32, value_chunk=128, num_warps=4)

# 32 keys x 576 bytes: 4 x 16 + 1 x 8 bytes for each of 256 lanes. 96 rows x 32 keys x 1,088.
GOOD = KernelFacts(
    registers=450,
    spilled_registers=0,
    scalar_spills=0,
    scratch_bytes=0,
    lds_bytes=17408,
    tensor_memory_columns=0,
    lanes=256,
    instructions=2230,
    matrix_instructions=(("v_mfma_f32_16x16x128_f8f6f4", 16),),
    loads=((4, 5), (8, 4), (16, 22)),
    loop=LoopFacts(543, 72, 90, 6, ((4, 1), (8, 1), (16, 4)), 96 * 32 * 1088),
)

AMD = """
kernel:
	s_load_dwordx4 s[0:3], s[4:5], 0x0
	s_branch .LBB0_1
.LBB0_1:                                ; %entry
	global_load_dwordx4 v[0:3], v4, s[0:1] offset:16
	v_add_u32_e32 v1, v2, v3 ; v_mfma_f32_16x16x32_fp8_fp8 in a comment
.LBB0_2:                                ; =>This Loop Header: Depth=1
	.loc	1 10 3
	s_cbranch_execz .LBB0_4
.LBB0_3:                                ; Inner Loop Header: Depth=2
	global_load_dwordx4 v[0:3], v4, s[0:1]
	buffer_load_dwordx2 v[0:1], v4, s[0:3], 0 offen
	global_load_ushort v9, v[0:1], off
	ds_read_b128 v[0:3], v4
	ds_write_b8 v4, v5
	v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[0:7], v[0:7], 0
	v_mfma_f32_32x32x16_fp8_fp8 a[0:15], v[0:1], v[0:1], a[0:15]
	s_cbranch_scc1 .LBB0_3
.LBB0_4:
	global_store_dword v0, v1, s[0:1]
	s_cbranch_vccnz .LBB0_2
	s_endpgm
.Lfunc_end0:
	v_nop
	.section	.AMDGPU.csdata
amdhsa.kernels:
  - .agpr_count:     16
    .group_segment_fixed_size: 32
    .private_segment_fixed_size: 12
    .sgpr_spill_count: 2
    .vgpr_count:     40
    .vgpr_spill_count: 3
"""

RESOURCES = "REG:255 STACK:120 SHARED:1024 LOCAL:0 CONSTANT[0]:664 TEXTURE:0 SURFACE:0 SAMPLER:0"
SASS = """
folded_decode_kernel:
.text.folded_decode_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   STL.64 [R1+0x28], R5 ;
        /*0020*/              @!P0 STL [R1+0x20], R5 ;
.L_x_1:
        /*0030*/                   LDG.E.128 R156, desc[UR6][R164.64] ;
        /*0040*/              @!P2 LDG.E R220, desc[UR6][R152.64] ;
.L_x_2:
        /*0050*/               @P1 SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0060*/              @!P0 BRA `(.L_x_2) ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R155+0x11000], desc[UR6][R152.64], !P2 ;
        /*0080*/                   LDG.E.U8 R3, desc[UR6][R152.64] ;
        /*0090*/                   LDSM.16.M88.4 R4, [R3] ;
        /*00a0*/                   QGMMA.64x16x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24 ;
        /*00b0*/               @P3 BRA `(.L_x_1) ;
        /*00c0*/                   EXIT ;
.L_x_6:
        /*00d0*/                   BRA `(.L_x_6);
        /*00e0*/                   NOP ;
"""
PTX = """
	wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%f1}, %rd1, %rd2, p, 1, 1;
	wgmma.commit_group.sync.aligned;
"""


def test_amd_code_is_read():
    facts = amd_facts(AMD, lds_bytes=1000, lanes=256)
    assert (facts.registers, facts.spilled_registers, facts.scalar_spills) == (40, 3, 2)
    assert (facts.scratch_bytes, facts.lds_bytes, facts.instructions) == (12, 1032, 16)
    assert facts.matrix_instructions == (
        ("v_mfma_f32_16x16x128_f8f6f4", 1),
        ("v_mfma_f32_32x32x16_fp8_fp8", 1),
    )
    assert facts.loads == ((2, 1), (8, 1), (16, 2))
    loop = facts.loop
    assert (loop.instructions, loop.matrix, loop.lds, loop.global_) == (8, 2, 2, 3)
    assert loop.matrix_macs == (16 * 16 * 128 + 32 * 32 * 16) * 4
    assert facts.loop_load_bytes(8) == 256 * (16 + 8)


def test_nvidia_code_is_read():
    facts = nvidia_facts(RESOURCES, SASS, PTX, 73728, 256, 0)
    assert (facts.registers, facts.spilled_registers, facts.scratch_bytes) == (255, 3, 120)
    assert facts.matrix_instructions == (
        ("wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3", 1),
    )
    assert facts.loads == ((1, 1), (4, 1), (16, 2))
    loop = facts.loop
    assert (loop.instructions, loop.matrix, loop.lds, loop.global_) == (9, 1, 1, 4)
    assert loop.matrix_macs == 64 * 16 * 32 * 2


def test_a_kernel_without_loops_has_no_main_loop():
    facts = nvidia_facts(RESOURCES, "        /*0000*/   EXIT ;\n", "", 0, 128, 0)
    assert facts.loop == LoopFacts(matrix_macs=0)


@pytest.mark.parametrize(
    ("target", "changes", "expected"),
    [
        ("gfx950", {}, 1),  # 456 registers, 4 waves: one wave per SIMD
        ("gfx950", {"registers": 256}, 2),
        ("gfx950", {"registers": 257}, 1),
        ("gfx950", {"registers": 100, "lds_bytes": 80 * 1024}, 2),
        ("gfx950", {"registers": 100, "lds_bytes": 161 * 1024}, 0),
        ("gfx942", {"registers": 24, "lds_bytes": 40 * 1024}, 1),
        ("sm_90", {"registers": 255, "lds_bytes": 1024}, 1),  # 256 x 256 of 65,536
        ("sm_90", {"registers": 128, "lds_bytes": 1024}, 2),
        ("sm_90", {"registers": 32, "lds_bytes": 100 * 1024}, 2),
        ("sm_100", {"registers": 32, "tensor_memory_columns": 512}, 1),
    ],
)
def test_workgroups_per_unit(target, changes, expected):
    assert CHIPS[target].workgroups_per_unit(replace(GOOD, **changes)) == expected


def test_a_good_decode_has_no_problem():
    assert resource_problems("decode", "gfx950", GOOD) == []
    assert decode_problems("gfx950", SHAPE, LAUNCH, GOOD, "f8f6f4") == []
    assert kv_reads(SHAPE, LAUNCH, GOOD) == 1


LOOP = GOOD.loop


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spilled_registers": 1}, "1 registers are spilled"),
        ({"scalar_spills": 2}, "2 scalar registers are spilled"),
        ({"scratch_bytes": 4}, "4 bytes of scratch"),
        ({"lds_bytes": 163841}, "163,841 bytes of LDS"),
        ({"registers": 520}, "no workgroup fits"),
        ({"matrix_instructions": ()}, "found none"),
        ({"matrix_instructions": (("v_mfma_f32_16x16x32_f16", 8),)}, "fp8 is widened"),
        ({"loop": LoopFacts()}, "computes nothing"),
        ({"loop": replace(LOOP, matrix_macs=LOOP.matrix_macs - 1)}, "part of it is missing"),
        ({"loop": replace(LOOP, loads=((8, 9),))}, "16-byte loads bring 0"),
        ({"loop": replace(LOOP, loads=((16, 4),))}, "one pass loads 16,384"),
        ({"loop": replace(LOOP, loads=((16, 9),))}, "read 2.00 times"),
    ],
)
def test_every_check_can_fail(changes, said):
    facts = replace(GOOD, **changes)
    problems = resource_problems("decode", "gfx950", facts)
    problems += decode_problems("gfx950", SHAPE, LAUNCH, facts, "f8f6f4")
    assert any(said in problem for problem in problems), problems


def test_a_plan_may_keep_scalars_in_vector_registers_but_not_in_memory():
    facts = replace(GOOD, scalar_spills=66)
    assert resource_problems("plan", "gfx950", facts) == []
    assert resource_problems("combine", "gfx950", facts)
    assert resource_problems("plan", "gfx950", replace(facts, scratch_bytes=4))


def test_two_row_tiles_are_two_reads():
    half = replace(LAUNCH, row_groups=(64, 0))
    assert kv_reads(SHAPE, half, GOOD) == 2
    problems = decode_problems("gfx950", SHAPE, half, GOOD, "f8f6f4")
    assert any("2 row tiles" in problem for problem in problems)
    assert not decode_problems("gfx942", SHAPE, half, GOOD, "f8f6f4")


def test_what_did_not_compile_is_a_problem():
    row = judge(subjects("gfx950")[0], Outcome(None, "f8f6f4", "Some: reason"), NO_BOUNDS)
    assert row.problems == ("does not compile: Some: reason",)
    document = row.document()
    assert (document["ok"], document["workgroups_per_cu"]) == (False, 0)


def test_bounds_fail_on_each_number_that_gets_worse():
    recorded = bounded_numbers("gfx950", GOOD)
    assert set(recorded) == {*kernel_bounds.UPPER, *kernel_bounds.LOWER}
    bounds = Bounds("3.9.0", True, {"gfx950": {"one": recorded}})
    assert bound_problems(bounds, "gfx950", "one", GOOD) == []
    for key in recorded:
        step = -1 if key in kernel_bounds.UPPER else 1
        tighter = Bounds("3.9.0", True, {"gfx950": {"one": recorded | {key: recorded[key] + step}}})
        assert [p.split()[0] for p in bound_problems(tighter, "gfx950", "one", GOOD)] == [key]
    assert "no bounds are recorded" in bound_problems(bounds, "gfx950", "two", GOOD)[0]
    assert bound_problems(replace(bounds, compared=False), "gfx950", "two", GOOD) == []


def test_bounds_are_kept_for_exactly_the_reported_kernels(tmp_path):
    bounds = load_bounds("3.9.0")
    for target in TARGETS:
        assert set(bounds.kernels[target]) == {subject.name for subject in subjects(target)}
    path = tmp_path / "bounds.json"
    kernel_bounds.save_bounds("3.9.0", bounds.kernels, path)
    assert load_bounds("3.9.0", path) == replace(bounds, triton="3.9.0", compared=True)
    assert not load_bounds("3.8.0", path).compared
    path.write_text('{"schema": "other"}')
    with pytest.raises(ValueError, match="update-bounds"):
        load_bounds("3.9.0", path)


def test_ridges_are_those_of_the_roofline():
    # 20-decode: memory-bound up to about 109 rows on H200, 149 on B200, 165 on MI355X.
    ridges = {target: ridge_rows(CHIPS[target], "fp8") for target in TARGETS}
    assert ridges["sm_90"] == pytest.approx(109, abs=1)
    assert ridges["sm_100"] == pytest.approx(149, abs=1)
    assert ridges["gfx950"] == pytest.approx(165, abs=1)
    assert ridge_rows(CHIPS["sm_90"], "bf16") == pytest.approx(ridges["sm_90"], rel=0.01)


def test_tile_times_are_plain_arithmetic():
    times = tile_times("gfx950", SHAPE, LAUNCH, GOOD)
    assert times.memory_ns == pytest.approx(32 * 576 / (8e12 / 256) * 1e9)
    assert times.matrix_ns == pytest.approx(2 * 96 * 32 * 1088 / (5e15 / 256) * 1e9)
    assert times.issue_ns == pytest.approx(543 * 4 / 2.4)
    assert times.bandwidth_share == pytest.approx(times.memory_ns / times.issue_ns)


def test_peers_are_compared_per_row_and_key():
    document = peer_document(
        "ours", "x", "gfx950", GOOD, tile_tokens=32, rows=96, reads=1, kv_element_bytes=1
    )
    assert document["wave_instructions_per_row_and_key"] == round(543 * 4 / (96 * 32), 2)
    assert (document["loads_over_tile_bytes"], document["kv_bytes_per_key"]) == (1.0, 576)
    assert peer_table([document]).count("\n") == 3


def test_document_sections_are_replaced_or_missed():
    text = "a\n<!-- begin t -->\nold\n<!-- end t -->\nb\n"
    assert with_section(text, "t", "new\n") == "a\n<!-- begin t -->\n\nnew\n\n<!-- end t -->\nb\n"
    with pytest.raises(ValueError, match="begin other"):
        with_section(text, "other", "new")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--target", "gfx90a"), ("--target", "gfx90a", "sm_100")),
        (("--target", "gfx950,gfx950"), ("--target", "different")),
        (("--kernel", "encode"), ("--kernel", "encode", "decode TP8 1 token")),
        (("--jobs", "0"), ("--jobs", "1")),
        (("--dtype", "fp4"), ("--dtype", "fp8", "bf16")),
        (("--json", "x"), ("x",)),
    ],
)
def test_bad_flags_are_named(capsys, words, expected):
    assert_refused(run_here(capsys, "kernels", *words), *expected)


def test_without_triton_the_remedy_is_named():
    outcome = run_fresh("kernels", "--json", block=("triton",))
    assert_refused(
        replace(outcome, stderr=outcome.stderr.split("loaded:")[0].rstrip("\n")),
        "triton",
        "pip install",
    )


@pytest.mark.compiler
@pytest.mark.parametrize("target", TARGETS)
def test_production_kernels_are_as_good_as_recorded(target):
    import triton

    bounds = load_bounds(triton.__version__)
    assert bounds.compared, (
        f"bounds are of triton {bounds.triton}, this is {triton.__version__}: record them anew "
        "with tools/kernel_report.py --update-bounds"
    )
    rows = compile_rows(choose([target]), bounds, jobs=1)
    worse = [f"{row.subject.name}: {p}" for row in rows for p in row.problems]
    assert not worse, "where a bound has to move: tools/kernel_report.py --update-bounds"
    table = kernel_tables(rows)
    assert table in DOCUMENT.read_text(), "run tools/kernel_report.py --write-docs"


@pytest.mark.compiler
def test_the_document_has_the_schema(capsys):
    outcome = run_here(capsys, "kernels", "--target", "gfx950", "--kernel", "TP8 8", "--json")
    assert outcome.code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert document["schema"] == "k3backend.kernels/1"
    assert [kernel["name"] for kernel in document["kernels"]] == [
        "decode TP8 8 tokens",
        "combine TP8 8 tokens",
    ]
    kernel = document["kernels"][0]
    numbers = ("registers", "spilled_registers", "scalar_spills", "scratch_bytes", "lds_bytes")
    assert all(isinstance(kernel[key], int) for key in (*numbers, "workgroups_per_cu"))
    assert kernel["target"] == "gfx950"
    assert kernel["config"]["row_groups"] == [64, 32]
    assert any("f8f6f4" in name for name in kernel["matrix_instructions"])
    assert kernel["global_load_bytes"]["16"] > 0
    assert set(kernel["main_loop"]) == {"instructions", "matrix", "lds", "global"}
    assert (kernel["ok"], kernel["problems"]) == (True, [])
    assert kernel["kv_reads"] == 1


@pytest.mark.compiler
def test_bfloat16_is_shown_without_bounds():
    subject = next(s for s in subjects("gfx950", "bf16") if "TP8 8 tokens" in s.name)
    outcome = compile_subject(subject)
    row = judge(subject, outcome, load_bounds("any"))
    assert (row.subject.name, row.problems) == ("decode TP8 8 tokens bf16", ())
    assert all("bf16" in name for name, _ in row.facts.matrix_instructions)
    assert kv_reads(subject.shape, subject.launch, row.facts) == 1


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("gfx950", "TP8 1 token bf16"),
        ("gfx942", "TP8 1 token bf16"),
        ("gfx942", "TP8 8 tokens bf16"),
        ("sm_90", "TP8 1 token bf16"),
        ("sm_90", "TP8 8 tokens bf16"),
        ("sm_100", "TP8 1 token bf16"),
        ("sm_100", "TP8 8 tokens bf16"),
    ],
)
def test_bfloat16_decodes_show_no_problem(target, name):
    (subject,) = (s for s in subjects(target, "bf16") if s.name == f"decode {name}")
    row = judge(subject, compile_subject(subject), NO_BOUNDS)
    assert row.problems == ()
    if "1 token" in name:
        assert tile_times(target, subject.shape, subject.launch, row.facts).bandwidth_share >= 0.7


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("target", "dtype"), [("sm_90", "fp8"), ("sm_90", "bf16"), ("sm_100", "fp8")]
)
def test_keys_are_in_flight_while_others_are_multiplied_on_nvidia(target, dtype):
    subject = next(s for s in subjects(target, dtype) if "TP8 8 tokens" in s.name)
    code = _loop_code(subject)
    if subject.launch.prefetch:
        # Loads into registers come before the products, and what they bring is used a step later.
        loads = [i for i, name in enumerate(code) if name.startswith("LDG.E.128")]
        assert loads
        assert max(loads) < next(i for i, name in enumerate(code) if "GMMA" in name)
    else:
        assert _waits(code)
        assert all(left > 0 for left in _waits(code))
        two = replace(subject, launch=replace(subject.launch, num_stages=2))
        assert 0 in _waits(_loop_code(two)), "two stages wait for every load"


@pytest.mark.compiler
def test_values_of_fp8_are_summed_in_float32_on_sm_90():
    """Hopper's fp8 matrix unit sums in fewer bits: what it makes of a tile is added outside."""
    subject = next(s for s in subjects("sm_90") if "TP8 8 tokens" in s.name)
    assert subject.launch.exact_sums
    # One multiply-add per accumulator of a thread: the sum so far, decayed, and the tile's.
    accumulators = 64 * 512 // (subject.launch.num_warps * 32)
    assert sum(line.startswith("FFMA") for line in _loop_code(subject)) >= accumulators
    narrow = replace(subject, launch=replace(subject.launch, exact_sums=False))
    assert sum(line.startswith("FFMA") for line in _loop_code(narrow)) < accumulators


def test_only_hopper_s_fp8_needs_sums_outside_of_the_matrix_unit():
    exact = {
        (q, capability): nvidia_launch(96, q_dtype=q, capability=capability).exact_sums
        for q in ("fp8", "bf16")
        for capability in (90, 100)
    }
    assert [key for key, value in exact.items() if value] == [("fp8", 90)]


def _loop_code(subject) -> list[str]:
    """Names and operands of the main loop."""
    from k3backend.common.kernels.disassembly import disassemble
    from k3backend.report import nvidia_code
    from k3backend.report.kernel_requests import compile_request

    sass = disassemble(compile_request(subject).compile().asm["cubin"]).sass
    loop = nvidia_code._listing(sass).main_loop(nvidia_code._is_matrix)
    return [f"{i.name} {i.operands}" for i in loop]


def _waits(code: list[str]) -> list[int]:
    """How many groups of copies may still be on their way, at every wait for some."""
    return [int(line.split(",")[1], 16) for line in code if line.startswith("DEPBAR.LE SB0")]


def _mutated(target: str, **launch: object) -> tuple[str, ...]:
    """Problems of the 8-token decode with another launch choice."""
    subject = next(s for s in subjects(target) if s.name == "decode TP8 8 tokens")
    subject = replace(subject, launch=replace(subject.launch, **launch))
    return judge(subject, compile_subject(subject), NO_BOUNDS).problems


@pytest.mark.compiler
def test_a_launch_choice_that_spills_is_caught():
    problems = _mutated("gfx950", row_groups=(128, 0), tile_tokens=64, num_warps=8)
    assert any("registers are spilled" in problem for problem in problems), problems


@pytest.mark.compiler
def test_a_kernel_that_compiles_to_nothing_is_caught():
    problems = _mutated("sm_100", row_groups=(128, 0))
    assert any("computes nothing" in problem for problem in problems), problems
    assert any("16-byte loads bring 0" in problem for problem in problems), problems


@pytest.mark.compiler
def test_fp8_that_is_widened_is_caught():
    problems = _mutated("sm_90", row_groups=(16, 0))
    assert any("fp8 is widened" in problem for problem in problems), problems


@pytest.mark.compiler
def test_a_compile_that_fails_is_one_line_of_its_row(capfd):
    subject = next(s for s in subjects("sm_90") if s.name == "decode TP8 8 tokens")
    subject = replace(subject, launch=replace(subject.launch, tile_tokens=16))
    row = judge(subject, _compile_quietly(subject), NO_BOUNDS)
    assert len(row.problems) == 1
    assert row.problems[0].startswith("does not compile: AssertionError: ")
    assert "\n" not in row.problems[0]
    assert capfd.readouterr().err == ""
