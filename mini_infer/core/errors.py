"""Errors a caller can act on. Each message names the thing, what is allowed and the way out."""


class MiniInferError(Exception):
    """Base of every error that mini-infer raises on purpose."""


class ConfigError(MiniInferError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class ModelError(MiniInferError, ValueError):
    """A model folder that cannot be loaded: unsupported architecture, missing or mis-shaped weights."""


class RankError(MiniInferError, RuntimeError):
    """A rank has died, hangs, failed or computed something else: the engine is at its end."""


class RequestError(MiniInferError, ValueError):
    """A request that cannot be served. It costs no other request anything.

    `param` names the offending argument (as in the OpenAI error object), where there is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
