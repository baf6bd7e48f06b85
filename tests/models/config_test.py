import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcache_jax.caching import Cached, Constant, GatedResidual
from memcache_jax.layers import NoDecayParam
from memcache_jax.memories import Delta, Linear, SlidingWindowLinear
from memcache_jax.models import (
  AttentionSpec,
  LanguageModel,
  MemoryAsContextSpec,
  MemoryAsGateSpec,
  MemorySpec,
  ModelConfig,
  Size,
)


def parameters(config):
  """Number of parameters and of those that are not weights."""
  model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
  count = lambda state: sum(np.prod(x.shape) for x in jax.tree.leaves(state))
  return count(nnx.state(model, nnx.Param)), count(
    nnx.state(model, NoDecayParam)
  )


def test_presets_have_the_sizes_of_the_paper():
  # 12 d^2 a block (4 attention, 8 feed-forward) and the tied embedding.
  for size in (Size.paper_760m(), Size.paper_1_3b()):
    config = ModelConfig.transformer(size)
    total, other = parameters(config)
    d = config.dim
    hidden = -(-8 * d // (3 * 256)) * 256
    blocks = config.num_layers * (4 * d**2 + 3 * d * hidden)
    assert total - other == blocks + config.vocab_size * d
    assert other == (2 * config.num_layers + 1) * d
  total, _ = parameters(ModelConfig.transformer(Size.paper_760m()))
  assert round(total / 1e6, 1) == 728.7
  # q, k, v, o, output gate, router and feed-forward: 14 d^2, and small ones.
  memory = Cached(SlidingWindowLinear(), Constant(256), GatedResidual())
  for size in (Size.paper_760m(), Size.paper_1_3b()):
    config = ModelConfig.recurrent(size, memory)
    total, _ = parameters(config)
    per_block = (total - config.vocab_size * config.dim) / config.num_layers
    assert 14.0 < per_block / config.dim**2 < 14.3


def test_baselines_at_a_small_size():
  size = Size(64, 2, 2, vocab_size=16, hidden_dim=128, dtype=jnp.float32)
  mixers = lambda config: [type(spec).__name__ for spec in config.pattern]
  assert mixers(ModelConfig.samba(size)) == ["MemorySpec", "AttentionSpec"]
  assert ModelConfig.samba(size, window=8).pattern[1].window == 8
  retnet = ModelConfig.retnet(size)
  assert (retnet.hidden_dim, retnet.pattern[0].value_dim) == (128, 64)
  retnet = ModelConfig.retnet(Size.paper_760m())
  assert retnet.hidden_dim == 2048  # 4 d^2 in three matrices
  assert ModelConfig.deltanet(size).pattern[0].memory == Delta()
  assert ModelConfig.rwkv7(Size.paper_760m()).pattern[0].num_heads == 24
  assert ModelConfig.rwkv7(size).pattern[0].num_heads == 1


def test_configs_are_values():
  assert ModelConfig.tiny() == ModelConfig.tiny()
  assert hash(ModelConfig.tiny()) == hash(ModelConfig.tiny())
  assert ModelConfig.tiny(AttentionSpec(2), repeats=3).num_layers == 3


def test_errors(as_a_user):
  spec = MemorySpec(Linear(), 2)
  options = {"vocab_size": 16, "dim": 8}
  with pytest.raises(ValueError, match="num_layers=3, 2 in pattern"):
    ModelConfig(num_layers=3, pattern=(spec, spec), **options)
  with pytest.raises(ValueError, match="`pattern` must be a tuple"):
    ModelConfig(num_layers=1, pattern=[spec], **options)
  with pytest.raises(ValueError, match="`pattern` must be a tuple"):
    ModelConfig(num_layers=1, pattern=(Linear(),), **options)
  with pytest.raises(ValueError, match="0 in pattern"):
    ModelConfig(num_layers=1, pattern=(), **options)
  with pytest.raises(ValueError, match="`hidden_dim` .* got 0"):
    ModelConfig(num_layers=1, pattern=(spec,), hidden_dim=0, **options)
  for dtype in ("float33", jnp.int32, None):
    with pytest.raises(ValueError, match="`dtype` must be a floating dtype"):
      ModelConfig(num_layers=1, pattern=(spec,), dtype=dtype, **options)
  for name in ("tie_embeddings", "remat"):
    with pytest.raises(ValueError, match=f"`{name}` must be a bool"):
      ModelConfig(num_layers=1, pattern=(spec,), **{name: "no"}, **options)
  with pytest.raises(ValueError, match="`activations` must be a jax.P"):
    ModelConfig(num_layers=1, pattern=(spec,), activations=("d",), **options)
  with pytest.raises(ValueError, match="`memory` must be a Memory: got 'x'"):
    MemorySpec("x", 2)
  for kind in (lambda **o: MemorySpec(Linear(), **o), AttentionSpec):
    with pytest.raises(ValueError, match="`num_heads` must be an int"):
      kind(num_heads=0)
  with pytest.raises(ValueError, match="`window` must be an int"):
    AttentionSpec(2, window=0)
  with pytest.raises(ValueError, match="`config` must be a ModelConfig"):
    LanguageModel(None, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="`rngs` must be an nnx.Rngs: got 3"):
    LanguageModel(ModelConfig.tiny(), rngs=3)
  uneven = ModelConfig(
    num_layers=1, pattern=(MemorySpec(Linear(), 3),), **options
  )
  with pytest.raises(ValueError, match="`dim` must be divisible by .*dim=8"):
    LanguageModel(uneven, rngs=nnx.Rngs(0))


@pytest.mark.usefixtures("as_a_user")
def test_specs_are_checked_before_they_are_built():
  for make, message in (
    (lambda: MemoryAsGateSpec(None, 2), "`memory` must be a Memory"),
    (lambda: MemoryAsGateSpec(Linear(), 2, window=None), "`window` .* None"),
    (lambda: MemoryAsContextSpec(Linear(), 2, 0), "`segment_length` .* got 0"),
    (
      lambda: AttentionSpec(2, persistent_tokens=-1),
      "`persistent_tokens` .*-",
    ),
    (lambda: MemorySpec(Linear(), 2, key_dim=0), "`key_dim` .* got 0"),
  ):
    with pytest.raises(ValueError, match=message):
      make()
