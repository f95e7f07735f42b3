"""What the README tells a reader to type really runs."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from made_up import result

from experiments.lab.show.older import in_todays_words
from experiments.lab.show.pages import BEGIN, END, readme_with
from experiments.lab.store import result as store

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_ten_line_experiment(run_py: Callable[..., int], tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(# @package _global_.*?)```", README, flags=re.DOTALL)
    assert len(text.splitlines()) <= 10
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "block_size.yaml").write_text(text)
    # A model without weights and few requests: the same path through the lab, in seconds.
    quick = ["model=dry", "measure.repeats=1", "measure.processes=1", "workload.count=4"]
    places = [f"paths.{name}={tmp_path / name}" for name in ("results", "reports")]
    places.append(f"hydra.run.dir={tmp_path / 'out'}")
    assert run_py("--config-dir", str(tmp_path), "experiment=block_size", *quick, *places) == 0
    tables = (tmp_path / "results" / "block_size").glob("dry.in_process/cpu/*.csv")
    (result,) = (path for path in tables if not path.name.endswith((".requests.csv", ".gaps.csv")))
    measured = {(row["variant"], row["metric"]) for row in csv.DictReader(result.open())}
    assert measured == {(v, m) for v in ("b16", "b4", "b64") for m in ("output_tokens_per_s", "kv_utilization")}
    assert (
        "Do smaller KV blocks waste less memory" in (tmp_path / "reports" / "block_size.dry.in_process.md").read_text()
    )


def test_python_examples_use_names_that_exist() -> None:
    for block in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        for line in block.splitlines():
            if line.startswith(("from ", "import ")):
                exec(line, {})


def test_experiments_named_in_commands_exist() -> None:
    for name in re.findall(r"run\.py (?:-m )?experiment=(\w+)", README):
        assert name == "block_size" or (ROOT / "conf" / "experiment" / f"{name}.yaml").exists(), name


@cache
def stored() -> list[store.Result]:
    return [in_todays_words(result) for result in store.read_all(ROOT / "results")]


def test_the_table_of_figures_is_the_one_that_the_results_give() -> None:
    # But for how many commits there were since, which grows with each of them.
    told = re.sub(r", \d+ commits? since", "", README)
    assert readme_with(told, stored(), lambda _: 0) == told, "it is stale: run `python run.py report`"


def test_the_table_says_which_runs_were_cut_off() -> None:
    found = next(r for r in stored() if r.info.experiment == "overlap" and r.info.run == "default")
    table_of = partial(readme_with, f"{BEGIN}\n{END}", since=lambda _: 0)
    lines = [
        table_of([replace(found, info=replace(found.info, status=status))]).splitlines()[-2]
        for status in (store.COMPLETE, "incomplete: interrupted; 1 of 3 processes are complete")
    ]
    assert "INCOMPLETE" not in lines[0]
    assert lines[1].split(" | ")[1].endswith(" **INCOMPLETE**")
    assert lines[1].replace(" **INCOMPLETE**", "") == lines[0]


def test_each_mechanism_stands_there_once_in_its_largest_setting() -> None:
    served = [result(hardware="h200", scale=scale, via="http") for scale in ("0_6b", "30b_a3b", "7b")]
    others = [result("other", hardware=gpus, scale=scale) for gpus in ("h200", "h200x2") for scale in ("0_6b", "1_5b")]
    rows = readme_with(f"{BEGIN}\n{END}", [*served, *others, result()], lambda _: 0).splitlines()[3:-1]
    pages = [row.partition("](reports/")[2].partition(")")[0] for row in rows]
    assert pages == ["demo.30b_a3b.http.md", "other.1_5b.in_process.md"]
    assert [row.split(" | ")[3].rstrip(" |")[-6:] for row in rows] == [", h200", "h200x2"]
    assert all("2 supported" in row.split(" | ")[2] for row in rows)


def test_a_readme_without_a_place_for_the_table_is_left_alone() -> None:
    assert readme_with("# Another project\n", [], lambda _: 0) == "# Another project\n"
