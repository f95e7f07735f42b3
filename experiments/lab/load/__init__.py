"""Load over HTTP: the engine behind its own server, or any server that speaks the OpenAI API, as its clients see it.

    connection.py    one HTTP connection that notes each read and decodes nothing, and reads its events afterwards
    client.py        the processes of the load client: requests on schedule
    subject.py       a server of ours with a variant's settings, in processes of its own, and both together as a peer

The processes are peers' processes (peers/process.py): they end with the one that measures, and what goes wrong in them
is told with the last lines of their log.
"""
