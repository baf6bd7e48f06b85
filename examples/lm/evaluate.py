"""Evaluates the model of a finished run with the lm-evaluation-harness.

  python -m examples.lm.evaluate --model=runs/NAME/model --suite=commonsense
  python -m examples.lm.evaluate --model=runs/NAME/model --tasks=piqa,boolq

It needs the extra `eval`, and, for tasks whose texts lie on the Hub, a network
or a folder of the data set's name under the working directory. Needles in
haystacks need the package transformers and --metadata, as
'{"tokenizer": "FOLDER", "max_seq_lengths": [4096]}'; LongBench needs
`pip install "lm-eval[longbench]"`. Texts are read whole: LongBench's own cut in
the middle of prompts is --longest_prompt, and the results say what it took.
"""

import argparse
import json
import pathlib

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from examples.lm import export
from memcache_jax.evaluation import TASKS, HarnessModel

# What the paper (arXiv 2602.24281) reports in Tables 1 to 4, by the names of
# the harness and of our own task files. Its Table 3 has most of these at
# several lengths, with documents cut around the answer; here they are whole.
SUITES = {
  "commonsense": (
    *("wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande"),
    *("arc_easy", "arc_challenge", "social_iqa", "boolq"),
  ),
  "needles": ("niah_single_1", "niah_single_2", "niah_single_3"),
  "retrieval": (
    *("swde", "squad_completion", "fda", "based_triviaqa", "based_drop"),
    *("based_nq_512", "based_nq_1024", "based_nq_2048"),
  ),
  "longbench": tuple(
    f"longbench_{name}"
    for name in (
      *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa"),
      *("musique", "gov_report", "qmsum", "multi_news", "trec", "triviaqa"),
      *("samsum", "lcc", "repobench-p"),
    )
  ),
}


def main(argv: list[str] | None = None) -> None:
  """Evaluates, prints a table and writes the results down."""
  arguments = parse(argv)
  model, tokenizer = export.load(arguments.model)
  harness = HarnessModel(
    model,
    tokenizer,
    prefix_token=tokenizer.bos_id,
    stop_tokens=(tokenizer.eos_id,),
    batch_size=arguments.batch_size,
    longest_prompt=arguments.longest_prompt,
  )
  manager = TaskManager(
    include_path=[TASKS, *filter(None, [arguments.include])],
    # Indexing the thousands of tasks that come with it takes half a minute.
    include_defaults=arguments.include is None,
    metadata=arguments.metadata,
  )
  results = simple_evaluate(
    harness,
    tasks=list(SUITES.get(arguments.suite, arguments.tasks)),
    task_manager=manager,
    limit=arguments.limit,
    # Spread by resampling forks processes, which JAX's threads do not survive.
    bootstrap_iters=0,
  )
  print(make_table(results))
  for task, lost in harness.cuts.items():
    cut = {"cut_prompts": len(lost), "cut_tokens": sum(lost)}
    results["results"][task] |= cut
    print(f"{task}: {len(lost)} prompts lost {sum(lost)} tokens")
  if arguments.out is not None:
    text = json.dumps(results["results"], indent=1, default=str)
    arguments.out.write_text(text + "\n")


def parse(argv: list[str] | None) -> argparse.Namespace:
  """The flags."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--model", type=pathlib.Path, required=True, help="a trained model")
  tasks = parser.add_mutually_exclusive_group(required=True)
  tasks.add_argument("--suite", choices=SUITES, help="tasks of the paper")
  tasks.add_argument(
    "--tasks",
    type=lambda names: names.split(","),
    help="names of the harness, with commas between them",
  )
  add("--include", help="a folder of tasks, in place of the harness's own")
  add("--metadata", type=json.loads, help="what tasks want, as JSON")
  add("--limit", type=int, help="examples per task; all if not given")
  add("--batch_size", type=int, default=8, help="texts read together")
  add(
    "--longest_prompt",
    type=int,
    help="tokens; longer prompts of tasks that generate lose their middle",
  )
  add("--out", type=pathlib.Path, help="a JSON file for the results")
  return parser.parse_args(argv)


if __name__ == "__main__":
  main()
