# %% [markdown]
# # Your own workload
#
# Requests as you describe them, served by two engines, measured by the lab's own formulas.
#
# As a script: `python examples/workload.py`

# %%
from dataclasses import dataclass
from typing import ClassVar

from experiments.lab.judge import formulas
from experiments.lab.judge.metrics import Missing
from experiments.lab.measure.subjects import drive
from experiments.lab.workloads import Inputs, Item, Workload
from experiments.lab.workloads.base import Vocabulary, generator
from experiments.lab.workloads.random import RandomTokens
from mini_infer import EngineConfig, LLMEngine
from mini_infer.core.config import CacheConfig

METRICS = ("ttft_ms", "requests_per_s", "prefix_hit_rate")

# %% [markdown]
# Questions about few long files: each question is short, and stands behind one of the files. A workload makes token
# ids, so that a prompt has exactly the length that is stated, from a seed, so that it can be made again.


# %%
@dataclass(frozen=True)
class Reviews(Workload):
    kind: ClassVar[str] = "reviews"

    files: int = 2
    questions: int = 6
    file_tokens: int = 192
    question_tokens: int = 8
    output_tokens: int = 4

    @property
    def num_requests(self) -> int:
        return self.files * self.questions

    @property
    def in_flight(self) -> int:
        return 2

    def make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        tokens = RandomTokens(vocabulary.size, generator(seed, "tokens"))
        files = [tokens.draw(self.file_tokens) for _ in range(self.files)]
        items = [
            Item([*file, *tokens.draw(self.question_tokens)], self.output_tokens, shared_tokens=bool(asked) * len(file))
            for asked in range(self.questions)
            for file in files
        ]
        warmup = [Item(tokens.draw(self.file_tokens), self.output_tokens) for _ in range(2)]
        return Inputs(tuple(items), tuple(warmup))


# %% [markdown]
# ## Served with and without a prefix cache

# %%
workload = Reviews()
for caching in (False, True):
    config = EngineConfig(model="tiny-target", cache=CacheConfig(prefix_caching=caching, memory_gib=0.1))
    inputs = workload.make(Vocabulary(config.model), seed=0)
    engine = LLMEngine(config)
    drive(engine, inputs.warmup, workload.in_flight)
    served = drive(engine, inputs.measured, workload.in_flight)
    engine.close()
    found = formulas.measure(served, METRICS)
    print(f"prefix cache {'on' if caching else 'off'}:")
    for name, value in found.items():
        metric = formulas.describe(name)
        print(f"  {metric.label}: {value.reason if isinstance(value, Missing) else f'{value:.3g} {metric.unit}'}")

# %% [markdown]
# One pass of each says little; an experiment repeats them in turns, and gives an interval. To have the workload there,
# put the class beside the others in `experiments/lab/workloads`, name it in their table, and give it a file in
# `conf/workload`.
