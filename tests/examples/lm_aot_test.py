"""The report of `examples.lm` on a step that was compiled for other chips."""

import json

import jax
import jax.numpy as jnp
import pytest

from examples.lm import aot_report, aot_table, hlo_costs

# As the compiler for TPU prints it, shortened.
PROGRAM = """\
HloModule jit_step

%fused.1 (p: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} add(%p, %p), backend_config={"estimated_cycles":"9000"}
}

%fused.2 (p: f32[8]) -> bf16[16,8] {
  %g = bf16[16,8]{1,0} all-gather(%x), channel_id=7, dimensions={0}
}

%fused.3 (p: f32[8]) -> bf16[16,8] {
  %g = bf16[16,8]{1,0} all-gather(%x), channel_id=7, dimensions={0}
}

%elsewhere (p: bf16[64]) -> bf16[64] {
  ROOT %r = bf16[64]{0} all-reduce(%p), channel_id=8, to_apply=%add
}

%four (p: (s32[], f32[8])) -> pred[] {
  %c = s32[]{:T(128)} constant(4)
  ROOT %l = pred[] compare(%i, %c), direction=LT
}

%inner (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %h = bf16[16,8]{1,0} fusion(%y), kind=kLoop, calls=%fused.2
  %i = bf16[16,8]{1,0} fusion(%y), kind=kLoop, calls=%fused.3
  %k = f32[8]{0} custom-call(%y), custom_call_target="tpu_custom_call"
  ROOT %f = f32[8]{0} fusion(%y), kind=kLoop, calls=%fused.1, \
backend_config={"flag":false,"estimated_cycles":"10"}
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %w = (s32[], f32[8]{0}) while(%p), condition=%four, body=%inner
  ROOT %f = f32[8]{0} fusion(%y), calls=%fused.1, \
backend_config={"estimated_cycles":"100"}
}

ENTRY %main.9 (p: f32[8]) -> f32[8] {
  %s = (f32[8]{0}, f32[32]{0}) all-gather-start(%p), dimensions={0}
  %d = f32[32]{0} all-gather-done(%s)
  %o = ((bf16[64]{0}), bf16[64]{0}, u32[]) async-start(%q), calls=%elsewhere
  %e = bf16[64]{0} async-done(%o)
  %r = (f32[4]{0}, bf16[4]{0}) all-reduce(%p, %q), to_apply=%add
  ROOT %w = (s32[], f32[8]{0}) while(%p), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_loops_are_multiplied_out():
  found = hlo_costs.costs(PROGRAM)
  assert found.cycles == 3 * (4 * 10 + 100)
  assert found.kernels == 3 * 4
  in_main = 32 * 4 + 4 * (4 + 2) + 64 * 2
  assert found.collective_bytes == in_main + 12 * 16 * 8 * 2


@pytest.mark.parametrize(
  "branches",
  [
    "branch_computations={%body, %inner}",
    "true_computation=%body, false_computation=%inner",
  ],
)
def test_branches_count_each(branches):
  before, _ = PROGRAM.split("ENTRY")
  main = f"  ROOT %c = f32[8]{{0}} conditional(%i, %p, %p), {branches}"
  text = f"{before}ENTRY %main.9 (p: f32[8]) -> f32[8] {{\n{main}\n}}\n"
  assert hlo_costs.costs(text).cycles == 4 * 10 + 100 + 10


def test_a_program_of_this_machine_can_be_read():
  loop = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, x: x * 2.0, x))
  text = loop.lower(jnp.ones(3)).compile().as_text()
  assert hlo_costs.costs(text) == hlo_costs.Costs()


def test_bytes_of_a_chip():
  mesh = jax.make_mesh((1,), ("a",))
  one = jax.NamedSharding(mesh, jax.P("a"))
  tree = {"x": jax.ShapeDtypeStruct((4, 3), jnp.bfloat16)}
  assert aot_report.bytes_per_chip(tree, {"x": one}) == 24


def _record(config, seconds, total=1):
  sizes = dict.fromkeys(("parameters", "moments", "temporaries"), 2**29)
  return {
    "config": config,
    "topology": "v5e:2x2",
    "interconnect": 2**28,
    "total": total * 2**30,
    "hbm": 16 * 2**30,
    "step_seconds": seconds,
    "mfu": 0.25,
    "kernels": 0,
    **sizes,
  }


def test_the_newest_numbers_stand_in_the_table(tmp_path):
  kept = [
    _record("titans_grm_760m", 9.0),
    _record("titans_grm_760m", 3.0, total=17),
    _record("transformer_760m", 1.0),
  ]
  path = tmp_path / "aot.jsonl"
  path.write_text("".join(json.dumps(x) + "\n" for x in kept))
  found = aot_table.records(path)
  assert [x["config"] for x in found] == ["transformer_760m", "titans_grm_760m"]
  assert aot_table.table(found).splitlines()[-1] == (
    "| `titans_grm_760m` | v5e:2x2 | 0.50, 0.50 | 0.50 | 17.00, 16 | 0.25 | "
    "3.000 s | 25% | 3.00 |"
  )
  bars = aot_table.bars(found)
  assert "at most 2.5 times the step of Transformer++ " in bars
  assert "3.00, missed" in bars
  assert "All fit: 1 of 2" in bars
