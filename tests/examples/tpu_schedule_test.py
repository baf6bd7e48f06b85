"""Reading what the TPU's compiler wrote down."""

import importlib
import os

import jax
import pytest

from examples.benchmarks import (
  tpu_schedule,
  tpu_schedule_delta,
  tpu_schedule_reads,
)
from examples.benchmarks.tpu_schedule import Case

BUNDLES = """
  0x0     :  { %s1 = inlined_call_operand.vmem [shape: f32[8]] }
  0x1   LB: > { %v1 = vld [vmem:[#allocation2_spill] sm:$0xff] }
  0x2     : > > { %v2 = vmatmul.f32.gmra.mxu0 %v1 }
  0x3   LE: > > { %p1 = scmp.lt }
"""
PROGRAM = """
%body (x: s32[]) -> s32[] {
  ROOT %fusion.1 = s32[] fusion(), backend_config={"estimated_cycles":"7"}
}
%condition (x: s32[]) -> pred[] {
  %constant.3 = s32[]{:T(128)} constant(4)
}
ENTRY %main (x: s32[]) -> s32[] {
  %fusion.2 = s32[] fusion(), backend_config={"estimated_cycles":"100"}
  %while.1 = s32[] while(%x), condition=%condition, body=%body
}
"""


def test_bundles_are_counted_by_depth(tmp_path):
  (tmp_path / "1-a_kernel-final_bundles.txt").write_text(BUNDLES)
  depths, spilling = tpu_schedule.count_bundles(tmp_path, "a_kernel")
  assert dict(depths) == {0: 1, 1: 1, 2: 2}
  assert spilling == 1
  with pytest.raises(FileNotFoundError, match="another"):
    tpu_schedule.count_bundles(tmp_path, "another")


def test_loops_within_the_grid_are_counted_apart(tmp_path):
  loops = """
  0x0   LB: > { %s1 = sld [smem:[#allocation2]] }
  0x1   LB: > > { %v1 = vld [vmem:[#allocation2] sm:$0xff] }
  0x2     : > > { %v2 = vmatmul.f32.gmra.mxu0 %v1 }
  0x3   LB: > > { %p1 = scmp.lt }
  0x4     : > { %p2 = scmp.lt }
  """
  (tmp_path / "1-a_kernel-final_bundles.txt").write_text(loops)
  assert tpu_schedule_reads.loop_lengths(tmp_path, "a_kernel") == [2, 1]


@pytest.mark.parametrize(
  ("options", "loops"),
  [
    ({}, 1),
    ({"hidden": 512}, 1),
    ({"selected": 2}, 4),
    ({"selected": 2, "backward": True}, 5),
    ({"selected": 2, "hidden": 512}, 3),
  ],
)
def test_cycles_are_of_the_kernels_of_a_read(
  options, loops, tmp_path, monkeypatch
):
  monkeypatch.setattr(
    *(tpu_schedule_reads, "_place"),
    lambda: jax.sharding.SingleDeviceSharding(jax.devices()[0]),
  )
  case = tpu_schedule_reads.Read(128, **options)
  _, _, cycles = tpu_schedule_reads.prepare(case)
  text = "  0x0     : > { %s1 = sld }\n" + "  0x1   LB: > > { }\n" * loops
  [kernel] = case.kernels
  (tmp_path / f"1-{kernel}-final_bundles.txt").write_text(text)
  assert cycles(tmp_path, kernel) > case.heads


def test_tables_have_all_cases(monkeypatch, capsys):
  monkeypatch.setattr(os, "environ", dict(os.environ))
  measure = lambda case, dump: {"case": case, "there": dump.exists()}
  parts = {"some": (range(20), measure)}
  monkeypatch.setattr(tpu_schedule, "parts", lambda: parts)
  tpu_schedule.main([])
  assert capsys.readouterr().out.count("'there': True") == 20
  tpu_schedule.main(["--first", "3"])
  assert capsys.readouterr().out.count("'there': True") == 3


def test_loops_count_as_often_as_they_run():
  assert tpu_schedule.xla_cycles(PROGRAM) == 100 + 4 * 7
  case = Case(width=128, heads=2)  # 16 segments
  pieces = importlib.import_module(
    "memcache_jax.pallas_kernels.linear_attention.config"
  )
  config = pieces.Config(1, 4, 0)
  # 8 steps; 0, 1, 2 or 3 earlier blocks of 4 states, all in one iteration.
  depths = {0: 5, 1: 100, 2: 10}
  assert tpu_schedule.kernel_cycles(depths, case, config) == 5 + 800 + 120


def test_xla_forms_are_compiled_where_nothing_is_written_down(monkeypatch):
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_jf_dump_llo_text=true")
  assert tpu_schedule.without_dump(os.getenv, "LIBTPU_INIT_ARGS") is None
  assert "LIBTPU_INIT_ARGS" in os.environ


def test_every_table_has_its_place():
  text = tpu_schedule.README.read_text()
  for part in tpu_schedule.parts():
    assert f"<!-- {part} -->" in text


def test_what_the_matrix_units_need():
  # Of 256 tokens and width: 3 products per segment, and 7.5 reads on average.
  one = 2 * 256**3
  assert Case(256).flops == 8 * 16 * 10.5 * one
  assert Case(256, backward=True).flops == 8 * 16 * 22 * one


def test_what_reads_need():
  read = tpu_schedule_reads.Read
  one = 8 * 4096 * 2 * 256**2
  assert read(256).flops == 64 * one
  assert read(256, selected=2, backward=True).flops == 2 * 2 * one
  assert read(256, hidden=512).flops == 64 * 4 * one
  assert read(256, hidden=512, backward=True).flops == 3 * 64 * 4 * one
  # Every state is selected about 128 times, by some more and by some less.
  assert 64 < tpu_schedule_reads.tiles_in_use(read(256, selected=2), 128) < 128


def test_what_the_delta_rule_needs():
  rule = tpu_schedule_delta.Rule
  # Of each chunk of 128 tokens, in products with a state.
  one = 8 * (4096 // 128) * 2 * 128 * 256**2
  assert rule(256).flops == (4 / 2 + 3) * one
  assert rule(256, backward=True).flops == (10 / 2 + 7) * one
