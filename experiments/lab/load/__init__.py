"""Load over HTTP: the engine behind its own server, or any server that speaks the OpenAI API, as its clients see it.

The processes are peers' processes (peers/process.py): they end with the one that measures, and what goes wrong in them
is told with the last lines of their log.
"""
