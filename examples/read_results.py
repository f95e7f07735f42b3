# %% [markdown]
# # Reading a report's tables
#
# What was measured, what of it counts, and the ratio that the page shows.
#
# As a script, of the prefix cache on a CPU: `python examples/read_results.py`; of another result, at one of its points:
# `python examples/read_results.py latency/7b "batch 1"`

# %%
import sys
from pathlib import Path

import pandas as pd

from experiments.lab.judge import stats
from experiments.lab.store import result as store
from experiments.lab.store import runs

ROOT = Path(runs.__file__).resolve().parents[3]
named = [] if "ipykernel" in sys.modules else sys.argv[1:]  # a notebook's are not ours
name = named[0] if named else "prefix_cache/tiny.in_process"
point = named[1] if len(named) > 1 else ""
path = runs.find(ROOT / "results", name)
info = store.read(path).info
print(f"{info.title}\n{info.question}\n{info.provenance.command}, on {info.hardware}")

# %% [markdown]
# A row is one variant at one point, in one repeat of one process, and one metric of it. Rows that do not count say why.

# %%
rows = pd.read_csv(path.with_suffix(".csv"), keep_default_na=False)
if "process" not in rows:  # older results are of one
    rows["process"] = 0
print(f"{len(rows)} rows, of which {(rows.reason == '').sum()} count. Why others do not:")
for reason, count in rows[rows.reason != ""].reason.value_counts().head(3).items():
    print(f"  {count} x {reason}")

# %%
point = point or list(info.points)[-1]
if point not in info.points:
    sys.exit(f"there is no point {point!r}; points are {', '.join(info.points)}")
counted = rows[(rows.point == point) & (rows.reason == "")]
print(f"Medians at {point or 'the only point'}:")
print(counted.pivot_table(index="metric", columns="variant", values="value", aggfunc="median").to_string())

# %% [markdown]
# The page's ratio is that of the passes of one repeat and process to each other, so that the machine's mood falls out.

# %%
metric = next(iter(info.metrics))
of = {
    variant: {(row.process, row.repeat): row.value for row in group.itertuples()}
    for variant, group in counted[counted.metric == metric].groupby("variant")
}
for variant, values in of.items():
    if variant == info.baseline or not (ratio := stats.ratio(values, of.get(str(info.baseline), {}))):
        continue
    interval = "" if ratio.low is None else f", 95 % interval {ratio.low:.3g} to {ratio.high:.3g}"
    print(f"{info.metrics[metric].label}: {variant} is {ratio.median:.3g} times {info.baseline}{interval}")
