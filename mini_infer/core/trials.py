"""The dearer of two ways, taken now and then: who never takes it does not learn that it has become the cheaper one."""

from __future__ import annotations


class Trials:
    """Of a way whose cost shows only where it is taken. The estimates stay what was observed; this says when one that
    speaks against the way is put to the test: after more and more that went the other way, up to `RARELY`, and more
    where the way takes `DEAR` times as long or longer, so that trials take a quarter of all time at most. A trial that
    turns out well is followed by another one soon, and after a few of them by one each time, until one does not."""

    FIRST, RARELY = 6, 32  # that go the other way before a trial
    DEAR = 8
    WELL = 0.95  # of what the other way takes; a little less may be chance

    def __init__(self) -> None:
        self._pause, self._passed = self.FIRST, 0
        self._tried: dict[int, float] = {}  # size of what was tried -> seconds that the other way would have taken

    def pays(self, size: int, seconds: float, instead: float) -> bool:
        """Whether to go this way.

        Args:
            size: of what has to be done; `took` finds its trial by it.
            seconds: that this way is thought to take.
            instead: seconds that the other way takes.
        """
        if seconds <= instead:
            return True
        self._passed += 1
        if self._passed * instead * self.DEAR <= self._pause * max(seconds, instead * self.DEAR):
            return False
        self._passed = 0
        self._tried[size] = instead
        return True

    def took(self, size: int, seconds: float) -> None:
        """This way was taken."""
        if (instead := self._tried.pop(size, None)) is not None:
            well = seconds < self.WELL * instead
            self._pause = self._pause // 4 if well else min(max(2 * self._pause, self.FIRST), self.RARELY)
