"""Load over HTTP: the engine behind its own server, or any server that speaks the OpenAI API, as its clients see it."""
