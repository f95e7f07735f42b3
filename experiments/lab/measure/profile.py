"""Where a decode step's time goes on the GPU: kernel times by name and role, and how long the GPU waits between steps.

Made from a trace of torch.profiler (Chrome's JSON) in which each step stands inside an annotation. A kernel belongs to
the step during which it was launched, whenever it ran:

    host   | step 1: launch ...... | step 2: launch ...... | step 3
    GPU         [k k k k k k]  gap  [k k k k k k]  gap  [k k
                 \\_ body of 1 _/      \\_ body of 2 _/

A step's body is the CUDA graph with the most kernels, where it launched one, else all of its kernels. The GPU is idle
between two steps while no kernel runs from the end of one body to the start of the next. Copies are no kernels.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

STEP = "decode step"  # the annotation around one
VLLM_STEP = "execute_context"  # begins that of vLLM
STEPS = 25  # that are profiled
CALM = 8  # decode steps before them, and between two looks
ROLES = (
    "linear", "attention", "norm", "rope", "silu", "sample", "rows", "copy", "adapter", "router", "experts", "latent",
    "ranks", "elementwise", "other",
)  # fmt: skip
# In this order: FlashAttention is made with CUTLASS, and the argmax of a sampler is one of many reductions. Of our own
# kernels some are named by how they work: those of gemv.py, and of the sampler all. A router's picks the best, as a
# sampler's does, and ours has a norm in it.
# "elementwise" is what torch and its compiler make of operations, and of their names only how they go about it is left.
# "ranks" is what they send each other, with the norm behind it.
# "rows" is what a step reads before its first layer and books behind its last: tokens, embeddings, block tables.
_ROLE_PATTERNS = {
    "rows": r"(?<!rotary_)embedding|slot_mapping|block_table|indexSelect|(vectorized_gather|index_elementwise)_kernel|"
    r"^_(gather|settle)$",
    "copy": r"memcpy|memset|direct_copy|CatArray",
    "ranks": r"^_(sum|gather|add_copied)_kernel$|nccl|all_?reduce|cross_device_reduce",
    "adapter": r"^_(group|shrink|expand)_kernel$",
    "router": r"route_kernel$|topk_?(gating|softmax)|grouped_topk",
    "experts": r"^(few_gate_up|few_down|place|grouped|tall|combine|_dispatch|_combine)_kernel$|fused_moe|^moe_|"
    r"moe_(align|sum)|expert",
    "latent": r"^_head_products_kernel$|cache_mla",
    "attention": r"flash|prepare_varlen|fmha|attention|attn|paged_(decode|prefill)|mla|"
    r"^_(split_rows|merge_parts|merge)_kernel$",
    "linear": r"gemm|gemv|nvjet|cutlass|cublas|splitk|matmul|xmma|"
    r"^_(fma|dot|linear|add_parts|gated_linear|quant_linear|quantize|dequantize)_kernel$",
    "norm": r"norm|rsqrt",
    "rope": r"rope|rotary",
    "silu": r"silu|swiglu",
    "sample": r"sample|argmax|top_?k|radix|sort|softmax|multinomial|^(_maxima|guess|gather|find_cut|_weigh|_pick)$",
    "elementwise": r"elementwise|reduce_kernel|triton_(poi|red|per)_",
}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCH = {"cuda_runtime", "cuda_driver"}
NAME_LENGTH = 56


class NoProfile(Exception):
    """Why a trace shows no decode step on a GPU."""


@dataclass(frozen=True)
class KernelRow:
    """A kernel in an average decode step: how often it ran, and how long in which no other was running already."""

    variant: str
    point: str
    role: str
    kernel: str
    calls: float
    us: float


@dataclass(frozen=True)
class StepProfile:
    """Decode steps of a variant at a point. Times are means over the steps, in microseconds."""

    variant: str
    point: str
    steps: int  # that were profiled
    rows: int  # that decoded in each of them
    plain_us: float  # a step's time on the host's clock, without the profiler
    profiled_us: float  # from one step's start on the GPU to the next one's, under the profiler
    busy_us: float  # of these, while some kernel ran
    idle_us: float  # of these, while none ran between two steps; the rest is between the kernels of a step

    @property
    def idle_share(self) -> float:
        return self.idle_us / self.profiled_us


class _Ran(NamedTuple):
    """Something that ran on the GPU, in microseconds."""

    name: str
    start: float
    end: float
    launch: int  # what launched it; a graph launches many
    is_kernel: bool


def analyse(
    trace: Mapping[str, Any], variant: str, point: str, rows: int, plain_us: float
) -> tuple[StepProfile, list[KernelRow]]:
    """What a trace shows of its steps but the first, which the profiler's own start disturbs.

    Raises NoProfile where it holds no kernels, or fewer than three steps.
    """
    steps = _steps(trace)[1:]
    if len(steps) < 2:
        raise NoProfile("the trace shows no kernels of two steps or more")
    bodies = [_body(step) for step in steps]
    everything = sorted(chain(*steps), key=lambda ran: ran.start)
    kernels = [ran for ran in everything if ran.is_kernel]
    start, end, between = bodies[0][0].start, bodies[-1][0].start, len(steps) - 1
    waits = [(max(ran.end for ran in before), after[0].start) for before, after in pairwise(bodies)]
    summary = StepProfile(
        variant=variant,
        point=point,
        steps=between,
        rows=rows,
        plain_us=plain_us,
        profiled_us=(end - start) / between,
        busy_us=sum(_alone(kernels, start, end)) / between,
        idle_us=sum(max(0.0, until - since - sum(_alone(kernels, since, until))) for since, until in waits) / between,
    )
    # The longest first; of steps that ran something only now and then, the mean. Time in which two overlap counts for
    # the one that started first: a programmatic dependent (kernels/pdl.py) is in place early, and waits.
    times = defaultdict[tuple[str, str], list[float]](list)
    for ran, us in zip(everything, _alone(everything, -math.inf, math.inf), strict=True):
        times[role(ran.name), short_name(ran.name)].append(us)
    longest = sorted(times.items(), key=lambda each: sum(each[1]), reverse=True)
    return summary, [KernelRow(variant, point, *key, len(us) / len(steps), sum(us) / len(steps)) for key, us in longest]


def role(name: str) -> str:
    """What a kernel is for, guessed from its whole name."""
    found = (role for role, pattern in _ROLE_PATTERNS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, "other")


def role_of(row: KernelRow) -> str:
    """By what is known today: an older result may have called "other" what has a role by now."""
    known = role(row.kernel)
    return row.role if known == "other" else known


def short_name(name: str) -> str:
    """A name that fits a table: without return type, arguments and namespaces; of a generic kernel with the word of
    its template arguments that says what it does."""
    plain = re.sub(r"\(anonymous namespace\)::|\b(?:at|native|cub|cuda|detail|std|c10|thrust)::", "", name)
    plain = plain.removeprefix("void ")
    base, _, template = plain.partition("<")
    if not plain.startswith(("Memcpy", "Memset")):
        base = base.partition("(")[0].rpartition("::")[2].strip() or plain
    telling = re.search(r"\w*Functor\w*|Arg\w+Ops|\w+_kernel_cuda|cutlass_\w+", template)
    text = f"{base}<{telling.group()}>" if telling else base
    return text if len(text) <= NAME_LENGTH else f"{text[: NAME_LENGTH - 3]}..."


def _steps(trace: Mapping[str, Any]) -> list[list[_Ran]]:
    """What each annotated step launched, in the order in which it ran; steps without any kernel are left out."""
    events = [event for event in trace.get("traceEvents", []) if event.get("ph") == "X"]
    starts = sorted(
        e["ts"] for e in events if e.get("cat") == "user_annotation" and e["name"].startswith((STEP, VLLM_STEP))
    )
    launched = {_correlation(e): e["ts"] for e in events if e.get("cat") in _LAUNCH}
    found: dict[int, list[_Ran]] = defaultdict(list)
    for event in events:
        launch, start = _correlation(event), float(event["ts"])
        if event.get("cat") in _DEVICE and launch in launched:
            step = bisect_right(starts, launched[launch]) - 1
            ran = _Ran(event["name"], start, start + float(event["dur"]), launch, event["cat"] == "kernel")
            found[step].append(ran)
    ordered = [sorted(found[step], key=lambda ran: ran.start) for step in sorted(found) if step >= 0]
    return [step for step in ordered if any(ran.is_kernel for ran in step)]


def _correlation(event: Mapping[str, Any]) -> int:
    return int(event.get("args", {}).get("correlation", -1))


def _body(step: Sequence[_Ran]) -> list[_Ran]:
    """The kernels of the step's largest launch, or all of them where each was launched by itself."""
    kernels = [ran for ran in step if ran.is_kernel]
    launch, count = Counter(ran.launch for ran in kernels).most_common(1)[0]
    return [ran for ran in kernels if ran.launch == launch] if count > 1 else kernels


def _alone(ran: Sequence[_Ran], start: float, end: float) -> list[float]:
    """Microseconds of [start, end] that each of these, the first to start first, ran in while none before it did."""
    reached = accumulate((one.end for one in ran), max, initial=start)
    return [max(0.0, min(one.end, end) - max(one.start, before)) for one, before in zip(ran, reached, strict=False)]


def by_role(rows: Iterable[KernelRow]) -> dict[str, float]:
    """Microseconds a step of each role that has any, in the order of ROLES."""
    total: dict[str, float] = defaultdict(float)
    for row in rows:
        total[role_of(row)] += row.us
    return {name: total[name] for name in ROLES if total[name]}
