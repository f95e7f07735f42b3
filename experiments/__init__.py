"""The lab: experiments that measure the engine. Nothing in mini_infer imports from here."""
