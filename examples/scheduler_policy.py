# %% [markdown]
# # Your own scheduler policy
#
# A policy is a function that gives each request its place in the line; smaller places go first. This needs no weights:
# the dry model makes up its tokens.
#
# As a script: `python examples/scheduler_policy.py`

# %%
from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.config import ModelConfig, SchedulerConfig
from mini_infer.core.model_config import DryConfig
from mini_infer.core.request import Request

# %% [markdown]
# Those who ask for the least go first. Who asks for much may starve: fit for an example.


# %%
def fewest_output_tokens(request: Request, config: SchedulerConfig) -> float:
    return request.params.max_tokens or 0


# %% [markdown]
# Requests of several lengths, one at a time, in the order in which they end: by a policy that the engine has, or by our
# own.


# %%
LENGTHS = (400, 30, 200, 30, 300, 30)  # prompt tokens


def order(policy: str, own: bool = False) -> list[str]:
    dry = DryConfig(prefill_token_us=5)
    scheduler = SchedulerConfig(policy=policy, max_num_seqs=1)  # type: ignore[arg-type]
    engine = LLMEngine(EngineConfig(model=ModelConfig(path="dry", load_format="dry", dry=dry), scheduler=scheduler))  # type: ignore[arg-type]
    if own:
        engine.scheduler.place = fewest_output_tokens
    for index, length in enumerate(LENGTHS):
        params = SamplingParams(max_tokens=10 * (len(LENGTHS) - index), ignore_eos=True)
        engine.add_request([index + 1] * length, params, request_id=f"{length} in, {params.max_tokens} out")
    ended = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    engine.close()
    return ended


print("first come, first served: ", *order("fcfs"), sep="\n  ")
print("short prompts first:      ", *order("shortest"), sep="\n  ")
print("fewest output tokens first", *order("fcfs", own=True), sep="\n  ")

# %% [markdown]
# ## To keep it
#
# Put the function, called `place`, into a file of `mini_infer/runtime/scheduler/policies`, and the file's name into
# `Policy` of `mini_infer/core/config.py`. Then `engine.scheduler.policy=<name>` chooses it, and the property tests try
# it by themselves.
