# %% [markdown]
# # First tokens
#
# Answers in one batch, one as it comes, log-probabilities, and the loop itself; on the small model that ships.
#
# As a script: `python examples/first_tokens.py`

# %%
import math

from mini_infer import EngineConfig, LLMEngine, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)
engine = LLMEngine(EngineConfig(model="tiny-target"))

# %% [markdown]
# ## Two prompts in one batch

# %%
prompts = ["def fibonacci(n):\n", "class Stack:\n"]
for prompt, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
    print(prompt + output.outputs[0].text, "\n")

# %% [markdown]
# ## A chat, as it comes

# %%
for output in engine.stream([{"role": "user", "content": "Write a function that adds two numbers."}], GREEDY):
    print(output.outputs[0].text_delta, end="", flush=True)
print("\n")

# %% [markdown]
# ## What the model was sure of, and what not

# %%
(output,) = engine.generate("import ", SamplingParams(temperature=0, max_tokens=6, logprobs=0))
for token in output.outputs[0].logprobs or []:
    print(f"{engine.tokenizer.decode([token.token_id])!r:>12}  {math.exp(token.logprob):.2f}")

# %% [markdown]
# ## The loop
#
# Requests come and go between steps, and each step says what it did.

# %%
engine.add_request("for i in range(", SamplingParams(temperature=0, max_tokens=6), request_id="first")
while engine.has_unfinished_requests():
    for output in engine.step():
        print(f"{output.request_id}: {output.outputs[0].text_delta!r}")
    record = engine.records[-1]
    print(f"    {record.prefill_tokens} prompt tokens, {record.decode_tokens} running; {record.kv.used_blocks} blocks")
engine.close()
