"""Speculative decoding: what proposes tokens, what verifies them, and how many are worth proposing.

    propose   ngram.py      what followed the last tokens where they came before in prompt and output
              suffix.py     likewise by counts (automaton.py), over the outputs of finished requests as well
              synthetic.py  anything: accepted at a stated rate, for speed studies with random weights
    verify    verify.py     which drafts stand, and the token after them: greedy, or exact in distribution
              (kernels/verify.py does the same on a GPU)
    choose    costs.py      what a step costs by rows and tokens a row, measured at start-up; Leviathan's formula
              step_times.py what steps have taken since, over that
              adapt.py      drafts for each request, by tokens a second; none where they would lose
    engine    sources.py    a proposer for each request; drafts that a model writes, or that are made up
              proposer.py   what the scheduler sees of all this

Host proposers (ngram, suffix) belong to one request each, take lists of token ids and give lists of token ids: append
what was prompted or accepted with `extend`, ask with `propose(k)`. Drafts are not told to them: a rejected draft leaves
nothing behind. `verify` takes the logits of all of a step's sampling positions, flat, as the sampler does.

What proposes and what chooses knows nothing of the engine. sources.py and proposer.py know requests and plans; none
knows the scheduler or the runner.
"""
