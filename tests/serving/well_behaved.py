"""Well-behaved streams in a process of their own: says the gaps between what they receive, in seconds, as JSON.

python well_behaved.py PORT STREAMS SECONDS
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from attacks import STREAM, request


async def stream(port: int, until: float, gaps: list[float]) -> None:
    while time.monotonic() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(STREAM))
        await reader.readuntil(b"data: ")
        last = time.monotonic()
        while last < until:
            data = await reader.read(2**16)
            now = time.monotonic()
            if b"[DONE]" in data or not data:  # it has filled the model's length
                break
            gaps.append(now - last)
            last = now
        writer.transport.abort()


async def main(port: int, count: int, seconds: float) -> None:
    gaps: list[float] = []
    until = time.monotonic() + seconds
    await asyncio.gather(*(stream(port, until, gaps) for _ in range(count)))
    json.dump(sorted(gaps), sys.stdout)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
