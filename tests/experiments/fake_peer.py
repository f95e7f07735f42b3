"""A peer that makes its tokens up, for the tests of the process that a peer lives in. Its settings' `args` say how it
misbehaves; the prompt's first token is what it answers with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

from experiments.lab.measure.kinds import PeerAbsent
from experiments.lab.measure.profile import NoProfile
from experiments.lab.measure.traces import RequestTrace, Served
from mini_infer.core.errors import ConfigError


class Fake:
    def __init__(self, config, args):
        self._args, self._forgot = args, 0
        self.about = {"fake": "1.0", "threads": args.get("threads"), "dtype": config.model.dtype.value}
        if args.get("child"):
            self._child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            self.about["child"] = self._child.pid

    def serve(self, items, concurrency):
        fault = self._args.get("fault")
        print("noise on stdout")
        os.write(1, b"more noise, past Python\n")
        if fault == "raise":
            raise ValueError("planted")
        if fault == "die":
            print("the last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            time.sleep(600)
        now = time.perf_counter()
        traces = [
            RequestTrace(
                prompt_tokens=len(item.prompt),
                asked_tokens=item.output_tokens,
                arrival=now,
                token_times=tuple(now + 0.001 * (n + 1) for n in range(item.output_tokens)),
                token_ids=(item.prompt[0],) * item.output_tokens,
                cached_tokens=self._forgot,
                name=f"{item.name} in {concurrency}",
            )
            for item in items
        ]
        served = Served(tuple(traces), now, now + 1.0)
        return replace(served, peak_memory=7)

    def forget(self):
        self._forgot += 1

    def profile(self, items, variant, point):
        raise NoProfile(f"of {variant} at {point} it has only {[item.prompt for item in items]}")

    def close(self):
        pass


def open_peer(config, settings):
    args = settings.get("args", {})
    if args.get("fault") == "absent":
        raise PeerAbsent("it is not installed here")
    if args.get("fault") == "setting":
        raise ConfigError("cache.layout=contiguous is nothing for it")
    return Fake(config, {**args, "threads": settings.get("threads")})
