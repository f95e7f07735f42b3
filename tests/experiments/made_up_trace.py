"""Chrome traces of decode steps that nobody ran, as torch.profiler writes them."""

from experiments.lab.measure.profile import STEP


def event(category, name, start, duration, correlation=None):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": args}


def step(number, start, kernels, *, length, graph=False, prologue=0.0, copy_at=None):
    """One step of `length` us that launches `kernels`, (name, start after the step's, duration), as one graph or one by
    one; before the graph a small kernel of its own at `prologue`, and a copy to the host at `copy_at`."""
    base = 1000 * number
    events = [event("user_annotation", STEP, start, length)]
    if prologue:
        events.append(event("cuda_runtime", "cudaLaunchKernel", start + 0.1, 0.1, base + 900))
        events.append(event("kernel", "_fill_inputs_kernel", start + prologue, 1.0, base + 900))
    if graph:
        events.append(event("cuda_runtime", "cudaGraphLaunch", start + 0.2, 0.1, base))
    for index, (name, after, duration) in enumerate(kernels):
        launch = base if graph else base + 1 + index
        if not graph:
            events.append(event("cuda_driver", "cuLaunchKernel", start + 0.2 + 0.01 * index, 0.01, launch))
        events.append(event("kernel", name, start + after, duration, launch))
    if copy_at is not None:
        events.append(event("cuda_runtime", "cudaMemcpyAsync", start + 0.5, 0.1, base + 901))
        events.append(event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", start + copy_at, 2.0, base + 901))
    return events


KERNELS = [
    ("nvjet_tst_64x8_splitK_TNT", 2.0, 60.0),
    ("_flash_decode_kernel", 62.0, 20.0),
    ("_sample_kernel", 83.0, 7.0),
]


def trace(steps=5, *, length=100.0, graph=True, kernels=KERNELS, **more):
    """Each step's kernels run from 2 to 90 us after its start: 10 us of a step of 100 are left idle between two."""
    events = []
    for number in range(steps):
        events += step(number, 50.0 + number * length, kernels, length=length, graph=graph, **more)
    return {"traceEvents": [*events, {"ph": "M", "name": "process_name"}, event("cpu_op", "aten::mm", 3.0, 4.0)]}
