"""Speculative decoding: what proposes tokens, how many pay, what verifies them. docs/speculation.md tells how.

    plan, book  speculator.py   the seam: what the scheduler sees of speculation
                proposers/      who proposes: n-grams, suffixes by counts, a draft model, or anything at a stated rate
                policy/         how many drafts pay (optional), by acceptance rates and measured costs
                draft_plan.py   drafts in a step's plan, as far as there is room
    launch      draft_model.py  the draft model on the device, with its KV
                verify.py       which drafts stand, and the token after them (on a GPU kernels/sampling/verify.py)
    start-up    step_costs.py   times steps with and without drafts

proposers/ and policy/ know neither the scheduler nor the runner.
"""
