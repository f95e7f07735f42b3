"""Other systems that serve the same workload, timed with the same definitions.

    hf.py, hf_continuous.py, vllm.py   one a system, each with open_peer(config, settings)
    vllm_worker.py                     what vLLM runs where a model drafts: with a fault of it mended
    process.py                         a process of its own for one of them, as this one sees it, and what runs there
    pool.py                            which of them live, and whether the GPU has room

On a GPU every peer has a process of its own, in which nothing that it keeps is in another's way.
"""
