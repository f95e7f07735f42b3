"""The dearer of two ways, taken now and then: who never takes it does not learn that it has become the cheaper one."""

from __future__ import annotations


class Trials:
    """Of a way whose cost shows only where it is taken. The estimates stay what was observed; this says when one that
    speaks against the way is put to the test.

    A trial comes after `FIRST` that went the other way; after each one that turns out badly, or that nobody hears of
    before the next, twice as many go the other way first, up to `RARELY`. Where the way is thought to take more than
    `DEAR` times as long as the other, more go first, in proportion: so in the long run trials take a quarter at most of
    the time that the others do, while the first ones, after 6, 12 and 24, take more of it. A trial that turns out well
    is followed by another one soon, and after a few of them by one each time, until one does not.
    """

    FIRST, RARELY = 6, 32  # that go the other way before a trial
    DEAR = 8
    WELL = 0.95  # of what the other way takes; a little less may be chance

    def __init__(self) -> None:
        self._pause, self._passed = self.FIRST, 0
        self._trial: tuple[int, float] | None = None  # that is under way: size, and seconds the other way for each unit

    def pays(self, size: int, seconds: float, instead: float) -> bool:
        """Whether to go this way.

        Args:
            size: of what has to be done, above 0.
            seconds: that this way is thought to take.
            instead: seconds that the other way takes.
        """
        if seconds <= instead:
            return True
        self._passed += 1
        if self._passed * instead * self.DEAR <= self._pause * max(seconds, instead * self.DEAR):
            return False
        self._passed = 0
        if self._trial is not None:  # it came to nothing, or takes very long
            self._lengthen(1)
        self._trial = size, instead / size
        return True

    def took(self, size: int, seconds: float) -> None:
        """This way was taken. `size` may be less than what `pays` was asked about: of what is there by then, say. What
        is larger than the trial under way is another one's."""
        if self._trial is None or size > self._trial[0]:
            return
        (_, instead), self._trial = self._trial, None
        if seconds < self.WELL * instead * size:
            self._pause //= 4
        else:
            self._lengthen(self.FIRST)

    def _lengthen(self, least: int) -> None:
        self._pause = min(max(2 * self._pause, least), self.RARELY)
