"""Data of `examples.lm`: nothing lost, nothing repeated, for any number of
processes, and the same stream after a restart."""

import base64
import json
import lzma
from collections import Counter
from dataclasses import replace

import chex
import grain
import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
import tokenizers as hf
from array_record.python import array_record_module

from examples.lm import data, sources, tokenizers, train_tokenizer
from examples.lm.packing import Aligned, Batch, FirstFit, Place, Rows
from examples.lm.settings import DataSettings, ModelSettings, Settings
from examples.workdir import InputError

TEXTS = ["first\nline", "zweite ä", "the third of them", "4"]
PACKINGS = {
  "aligned": Aligned(length=16, align=4),
  "first_fit": FirstFit(length=16, max_documents=3, open_rows=4),
}


def tagged(count):
  """Documents of 0 to 23 bytes behind a number of their own."""
  sizes = np.random.default_rng(0).integers(24, size=count)
  return [f"<{i}>" + "x" * size for i, size in enumerate(sizes)]


def settings(**options):
  return replace(
    Settings(
      model=ModelSettings(segment_length=4, inner_batch=4),
      data=DataSettings(align=4),
      batch_size=4,
      length=16,
    ),
    **options,
  )


def batches(texts, options, rows, endless=True, prefetch=0):
  dataset = data.Batches(
    texts, tokenizers.ByteTokenizer(), options, rows, endless=endless
  )
  return data.iterator(dataset, prefetch)


# Sources.


def write(path, texts):
  """Files of every kind, by the ending of the path."""
  match path.suffix:
    case ".txt":
      path.write_text("\n\n\n".join(texts))
    case ".xz":
      path.write_bytes(lzma.compress("\n\n\n".join(texts).encode()))
    case ".jsonl":
      lines = [json.dumps({"id": 1, "text": text}) for text in texts]
      path.write_text("\n\n".join(lines) + "\n")
    case ".parquet":
      columns = {"text": texts, "n": list(range(len(texts)))}
      pyarrow.parquet.write_table(
        pyarrow.table(columns), path, row_group_size=1
      )
    case ".array_record":
      writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
      for text in texts:
        writer.write(text.encode())
      writer.close()


@pytest.mark.parametrize(
  "ending", ["txt", "txt.xz", "jsonl", "parquet", "array_record"]
)
def test_every_kind_of_file_gives_the_same_documents(tmp_path, ending):
  write(tmp_path / f"a.{ending}", TEXTS[:3])
  write(tmp_path / f"b.{ending}", TEXTS[3:])
  source = sources.open_source(f"{tmp_path}/*.{ending}", separator="\n\n\n")
  order = [3, 0, 2, 1]
  assert len(source) == 4
  assert [source[i] for i in order] == [TEXTS[i] for i in order]


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.csv", "x", "must match files of one kind"),
    ("a.txt", b"\xff\xfe", "cannot read"),
    ("a.txt.xz", "x", "cannot read"),
    ("a.jsonl", '{"txt": "x"}', r"a.jsonl:1 must be an object with a text"),
    ("a.jsonl", "[", r"a.jsonl:1 must be an object"),
  ],
)
def test_files_that_are_not_what_they_should_be(
  tmp_path, name, content, message
):
  path = tmp_path / name
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  with pytest.raises(InputError, match=message):
    sources.open_source(str(path))[0]
  with pytest.raises(InputError, match="no file matches"):
    sources.open_source(str(tmp_path / "absent.*"))


def test_held_out_documents_are_not_trained_on():
  source = list(range(23))
  held_out = data.Part(source, 5, True)
  rest = data.Part(source, 5, False)
  read = lambda part: [part[i] for i in range(len(part))]
  assert read(held_out) == [0, 5, 10, 15, 20]
  assert sorted(read(held_out) + read(rest)) == source


# Tokenizers.


def test_tokenizers_are_lossless(tmp_path):
  text = "".join(TEXTS) * 20
  (tmp_path / "text.txt").write_text(text)
  trained = tmp_path / "trained.json"
  train_tokenizer.train(str(tmp_path / "text.txt"), trained, vocab_size=280)
  sentencepiece.SentencePieceTrainer.train(
    input=str(tmp_path / "text.txt"),
    model_prefix=str(tmp_path / "pieces"),
    model_type="bpe",
    vocab_size=290,
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    minloglevel=2,
  )
  ranks = "".join(
    f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)
  )
  (tmp_path / "bytes.tiktoken").write_text(ranks)
  for name in ("bytes", trained, "pieces.model", "bytes.tiktoken"):
    path = name if name == "bytes" else str(tmp_path / name)
    tokenizer = tokenizers.load(path)
    ids = tokenizer.encode(TEXTS[1])
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == TEXTS[1]
    assert len({tokenizer.bos_id, tokenizer.eos_id}) == 2
    assert max(ids.max(), tokenizer.eos_id) < tokenizer.vocab_size
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())
  assert hf.Tokenizer.from_file(str(trained)).get_vocab_size() == 280


def test_a_tokenizer_that_does_not_exist():
  for name in ("absent.json", "README.md"):
    with pytest.raises(InputError, match="must be bytes or an existing file"):
      tokenizers.load(name)


# Packing.


@pytest.mark.parametrize("name", PACKINGS)
def test_every_token_is_a_target_once_and_can_be_traced(name):
  rng = np.random.default_rng(0)
  documents = [
    rng.integers(100, size=size) for size in rng.integers(2, 50, size=40)
  ]
  rows = list(Rows(grain.MapDataset.source(documents), PACKINGS[name]))
  pieces = []
  for row in rows:
    starts = np.flatnonzero(row.starts)
    assert row.mask[starts].all()
    if name == "aligned":
      assert not (starts % 4).any()
    else:
      assert len(starts) <= 3
    ends = [*starts[1:], 16]
    for start, end in zip(starts, ends, strict=True):
      real = slice(start, start + int(row.mask[start:end].sum()))
      assert row.mask[real].all()
      pieces.append((row.tokens[real], row.targets[real]))
  assert sum(row.mask.sum() for row in rows) == sum(
    len(x) - 1 for x in documents
  )
  # Every adjacent pair of tokens of the documents, as often as it is there.
  pairs = Counter()
  for inputs, targets in pieces:
    pairs.update(zip(inputs.tolist(), targets.tolist(), strict=True))
  expected = Counter()
  for x in documents:
    expected.update(zip(x[:-1].tolist(), x[1:].tolist(), strict=True))
  assert pairs == expected
  fill = np.mean([row.mask for row in rows])
  assert fill > 0.8


@pytest.mark.parametrize("name", PACKINGS)
def test_a_stream_goes_on_from_any_place(name):
  documents = grain.MapDataset.source([np.arange(n) for n in (2, 40, 9, 30, 5)])
  rows = list(Rows(documents, PACKINGS[name]))
  stream = Rows(documents, PACKINGS[name])
  for taken in range(len(rows)):
    other = Rows(documents, PACKINGS[name])
    other.seek(Place(*json.loads(json.dumps(stream.place))))
    rest = list(other)
    assert len(rest) == len(rows) - taken
    np.testing.assert_array_equal(rest[0].tokens, rows[taken].tokens)
    next(stream)


# Batches.


def text_of(read, row) -> str:
  """All that the batches of a process hold in one row."""
  ids = [batch.tokens[row][batch.mask[row]] for batch in read]
  return tokenizers.ByteTokenizer().decode(np.concatenate(ids))


# Rows of every process.
HOSTS = [[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]


@pytest.mark.parametrize("count", [103, 1003])
def test_every_document_once_for_any_number_of_processes(count):
  texts = tagged(count)
  options = settings(length=64)
  expected = None
  for hosts in HOSTS:
    for prefetch in (0, 2):
      read = [
        list(batches(texts, options, rows, endless=False, prefetch=prefetch))
        for rows in hosts
      ]
      texts_read = [
        text_of(host, row)
        for host, rows in zip(read, hosts, strict=True)
        for row in range(len(rows))
      ]
      expected = expected or texts_read
      assert texts_read == expected
      whole = [f"<{part}" for part in "".join(texts_read).split("<")[1:]]
      assert Counter(whole) == Counter(texts)


def test_every_pass_has_every_document_once_in_another_order():
  texts = tagged(41)
  orders = []
  for row in range(4):
    stream = data.Batches(
      texts, tokenizers.ByteTokenizer(), settings(), [row], endless=True
    )._streams[0]
    mine = len(texts[row::4])
    passes = [
      [bytes(stream[i][1:-1].astype(np.uint8)) for i in range(j, j + mine)]
      for j in (0, mine)
    ]
    assert sorted(passes[0]) == sorted(x.encode() for x in texts[row::4])
    assert sorted(passes[0]) == sorted(passes[1])
    orders.append(passes[0] != passes[1])
  assert all(orders)


def whole(run) -> Batch:
  """The next batch, of the rows of all processes of a run."""
  return jax.tree.map(lambda *rows: np.concatenate(rows), *map(next, run))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", PACKINGS)
def test_the_same_batches_after_a_restart_with_any_number_of_processes(
  name, prefetch
):
  options = settings(data=DataSettings(align=4, packing=name, max_documents=3))
  texts = tagged(20)
  start = lambda hosts: [
    batches(texts, options, rows, prefetch=prefetch) for rows in hosts
  ]
  close = lambda run: [process.close() for process in run]
  saved = []
  for hosts in HOSTS:
    run = start(hosts)
    for _ in range(3):
      whole(run)
    saved.append(sum((process.get_state()["places"] for process in run), []))
    expected = [whole(run) for _ in range(8)]  # and the next pass
    close(run)
  assert saved == saved[:1] * 3
  places = json.loads(json.dumps(saved[0]))
  for hosts in HOSTS:
    run = start(hosts)
    for process, rows in zip(run, hosts, strict=True):
      process.set_state({"places": [places[row] for row in rows]})
    for batch in expected:
      chex.assert_trees_all_equal(whole(run), batch)
    close(run)


def test_what_cannot_be_batched():
  with pytest.raises(InputError, match="a batch of 4 rows needs 4 documents"):
    batches(tagged(3), settings(), range(4))
  small = settings(
    model=ModelSettings(segment_length=4, inner_batch=4, vocab_size=256)
  )
  with pytest.raises(InputError, match="of the tokenizer, 258: got 256"):
    batches(tagged(9), small, range(4))

  class Wrong(tokenizers.ByteTokenizer):
    def encode(self, text):
      return np.array([1, 900], np.int32)

  wrong = data.Batches(tagged(9), Wrong(), settings(), [0], endless=True)
  with pytest.raises(ValueError, match=r"ids from 0 to 263: got 900"):
    next(iter(wrong))


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"length": 18}, "length must be a multiple of data.align"),
    ({"steps": 0}, "steps must be at least 1"),
    ({"data": DataSettings(align=2)}, "multiple of model.segment_length"),
    ({"data": DataSettings(align=4, packing="x")}, "aligned or first_fit"),
    ({"data": DataSettings(align=4, held_out=1)}, "held_out must be"),
  ],
)
def test_wrong_settings(options, message):
  with pytest.raises(InputError, match=message):
    settings(**options)
