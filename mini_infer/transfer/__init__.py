"""KV between engines: prompts are computed by one, and decoded by another (docs/disaggregation.md).

protocol.py   what is said, who waits for whom, and what both sides may rely on
receiver.py   the engine that decodes: asks, and is told what has arrived
sender.py     the engine that computes prompts: hears what is asked, and pushes blocks while it computes
shares.py     which rank has what for which rank of the other engine
pusher.py     copies what a step computes, layers at a time
blocks.py     KV memory as blocks of bytes
memory.py     a connector: blocks are written into the other engine's memory
stream.py     a connector: blocks go through a socket
nixl.py       a connector: NIXL writes blocks, on this machine or to another one
link.py       messages and bytes between two processes
address.py    where they find each other
"""
