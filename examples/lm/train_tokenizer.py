"""Trains a byte-level BPE tokenizer on the documents of a source.

python -m examples.lm.train_tokenizer --data='shards/*.parquet' \
  --out=data/tokenizer_32k.json --vocab_size=32000
"""

import pathlib

from absl import app, flags

from examples.lm import sources


def train(
  pattern: str,
  out: pathlib.Path,
  vocab_size: int,
  text_key: str = "text",
  documents: int = 100_000,
) -> None:
  """Writes a tokenizer that gives every text back byte for byte.

  Args:
    pattern: of files; see `examples.lm.sources`.
    out: the file.
    vocab_size: ids, the two marks included.
    text_key: field of the text, in JSON lines and parquet.
    documents: how many to learn from, evenly spread over the source.
  """
  import tokenizers

  source = sources.open_source(pattern, text_key)
  step = -(-len(source) // documents)
  texts = (source[i] for i in range(0, len(source), step))
  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  model.decoder = tokenizers.decoders.ByteLevel()
  model.train_from_iterator(
    texts,
    tokenizers.trainers.BpeTrainer(
      vocab_size=vocab_size,
      special_tokens=["<s>", "</s>"],
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    ),
  )
  out.parent.mkdir(parents=True, exist_ok=True)
  model.save(str(out))


def main(arguments: list[str]) -> None:
  """Trains, and says what came out."""
  del arguments
  given = flags.FLAGS
  out = pathlib.Path(given.out)
  train(given.data, out, given.vocab_size, given.text_key, given.documents)
  print(f"wrote {out}")


if __name__ == "__main__":
  # Here, as flags are one table for all that is imported into a process.
  flags.DEFINE_string("data", None, "A pattern of files of text.")
  flags.DEFINE_string("out", None, "The file to write, .json.")
  flags.DEFINE_integer("vocab_size", 32_000, "Ids, marks included.")
  flags.DEFINE_string("text_key", "text", "Field of the text.")
  flags.DEFINE_integer("documents", 100_000, "Read at most so many.")
  flags.mark_flags_as_required(["data", "out"])
  app.run(main)
