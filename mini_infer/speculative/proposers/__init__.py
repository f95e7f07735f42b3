"""Who proposes drafts.

Proposer      a draft model, on the device (speculative/draft_model.py): here its drafts are counted alone
lookup.py     what followed a request's last tokens where they came before: the latest place (n-grams), or
suffix.py     by counts, over the outputs of finished requests as well
synthetic.py  arbitrary tokens, to be accepted at a stated rate: for speed studies with random weights
"""

from __future__ import annotations

from mini_infer.core.plan import Draft
from mini_infer.core.request import Request


class Proposer:
    """A draft model, and what others override."""

    needs_tokens = False  # it reads the request's tokens themselves: none may be in flight

    def propose(self, request: Request, length: int) -> Draft:
        """At most `length` tokens; exactly so many, unless it needs tokens."""
        return Draft(length)

    def forget(self, request: Request) -> None:
        """It has ended: its tokens are all there will be."""
