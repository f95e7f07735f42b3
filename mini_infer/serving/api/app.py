"""The HTTP application: `mini-infer-serve`, or `uvicorn mini_infer.serving.api.app:app` with MINI_INFER_* variables."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response, Security
from fastapi.security import HTTPBearer
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Message, Receive, Scope, Send

import mini_infer
from mini_infer.core.errors import ConfigError
from mini_infer.serving.api import adapters, answers, docs_page, errors, schema
from mini_infer.serving.api.chat.chat import chat
from mini_infer.serving.api.chat.conversation import as_messages
from mini_infer.serving.api.chat.responses import respond
from mini_infer.serving.api.completions import complete
from mini_infer.serving.api.errors import MODEL, ApiError
from mini_infer.serving.api.gateway import Gateway
from mini_infer.serving.api.service import Service
from mini_infer.serving.api.sse import SERVER_SEND
from mini_infer.serving.http.acceptor import allow_many_open_files
from mini_infer.serving.http.bodies import CheckedRoute
from mini_infer.serving.metrics import CONTENT_TYPE
from mini_infer.serving.narration import Narrator
from mini_infer.serving.settings import ServerSettings, from_environment

logger = logging.getLogger("uvicorn.error")  # what the server's own messages go through

ABOUT = ("/metrics", "/docs", "/openapi.json")  # what a key can be asked for
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
LINGER_S = 2.0  # from the engine's death to the server's end: the running requests learn of it, and /healthz says so

probes = APIRouter(tags=["state"])
api = APIRouter(
    route_class=CheckedRoute,
    dependencies=[Security(HTTPBearer(auto_error=False, description="Where the server has keys."))],
    responses={"4XX": {"model": answers.ErrorResponse}, "5XX": {"model": answers.ErrorResponse}},
)


def create_app(
    settings: ServerSettings | None = None,
    on_engine_death: Callable[[], None] | None = None,
    engine_paths: Sequence[str] = (),
    accounts: int | None = None,
    homes_file: int | None = None,
) -> FastAPI:
    """The app; its engine, or its connection to one, starts and ends with it (ASGI lifespan).

    Args:
        settings: if not given, read from the environment when the app starts.
        on_engine_death: called when the engine process has been dead for LINGER_S.
        engine_paths, accounts, homes_file: as with Gateway.start.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        allow_many_open_files()
        settled = settings or _alone(from_environment(os.environ))
        gateway = await Gateway.start(settled, engine_paths, accounts, homes_file)
        app.state.gateway = gateway
        alone = gateway.settings.api_processes == 1  # else all of them would say the same
        every_s = gateway.settings.stats_interval
        telling = None
        if alone:
            narrator = Narrator(gateway.models, logger)
            narrator.tell()
            telling = asyncio.create_task(narrator.tell_every(every_s)) if every_s > 0 else None
        if on_engine_death is not None:
            gateway.on_engine_death(functools.partial(_linger, asyncio.get_running_loop(), on_engine_death))
        try:
            yield
        finally:
            if telling is not None:
                telling.cancel()
            await gateway.close()

    app = _App(
        title="mini-infer",
        version=mini_infer.__version__,
        description="The OpenAI API on a mini-infer engine.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load their code from elsewhere
        redoc_url=None,
        root_path=(settings and settings.root_path) or "",
    )
    if settings is not None and settings.origins:
        app.add_middleware(CORSMiddleware, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"])
    app.include_router(probes)
    app.include_router(api)
    errors.install(app)
    return app


def _alone(settings: ServerSettings) -> ServerSettings:
    for name, number in (("api_processes", settings.api_processes), ("engines", settings.num_engines)):
        if number > 1:
            raise ConfigError(f"{name} above 1 needs mini-infer-serve, which makes them; an app is one process")
    if settings.places_engines:
        raise ConfigError("gpus and parallel.launcher need mini-infer-serve, which starts engines where they say")
    for name in ("root_path", "allowed_origins", "ssl_certfile"):
        if getattr(settings, name) is not None:
            raise ConfigError(f"{name} needs mini-infer-serve; an app is served as whoever serves it was told")
    return settings


class _App(FastAPI):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self.state.gateway.count(f"responses {path} {message['status']}", scope.get(MODEL))
            await send(message)

        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope[SERVER_SEND] = send
        gateway: Gateway = self.state.gateway
        # With the root path or without: the router takes both.
        paths = scope["path"], scope["path"].removeprefix(self.root_path)
        if gateway.settings.key_everywhere and any(path in ABOUT for path in paths):
            try:
                gateway.callers.enter(Request(scope))
            except ApiError as error:
                gateway.count(f"refused {error.code}")
                await error.response()(scope, receive, counted)
                return
        await super().__call__(scope, receive, counted)


def _linger(loop: asyncio.AbstractEventLoop, end: Callable[[], None], reason: str) -> None:
    logger.error("%s", reason)
    loop.call_later(LINGER_S, end)


def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


def _service(request: Request, name: str | None) -> Service:
    """The model that a request names."""
    model = _gateway(request).find(name)
    request.scope[MODEL] = model.name
    return model.require()


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _unwell(gateway: Gateway, trouble: dict[str, Any]) -> Response:
    """A probe's 503."""
    gateway.complaint.say("503: the server is %s", ": ".join(map(str, trouble.values())))
    return _json({**trouble, **gateway.about()}, 503)


# --- the state of the server --------------------------------------------------------------------------------------


def _probe(path: str, *others: str, summary: str) -> Callable[[Endpoint], Endpoint]:
    """GET and HEAD."""

    def register(endpoint: Endpoint) -> Endpoint:
        probes.get(path, summary=summary)(endpoint)
        for each, methods in ((path, ["HEAD"]), *((other, ["GET", "HEAD"]) for other in others)):
            probes.add_api_route(each, endpoint, methods=methods, include_in_schema=False)
        return endpoint

    return register


@_probe("/healthz", "/health", summary="Whether the engine lives, with its settings; also as /health")
async def healthz(request: Request) -> Response:
    gateway = _gateway(request)
    if trouble := gateway.trouble:
        return _unwell(gateway, trouble)
    return _json({"status": gateway.status(), **gateway.about()})


@_probe("/readyz", "/ping", summary="Whether requests are taken; also as /ping")
async def readyz(request: Request) -> Response:
    gateway = _gateway(request)
    not_ready = gateway.trouble or ({"status": "stopping"} if gateway.stopping else {})
    return _unwell(gateway, not_ready) if not_ready else _json({"status": "ready"})


@_probe("/version", summary="Of the server")
async def version() -> Response:
    return _json({"version": mini_infer.__version__})


@probes.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    return Response(docs_page.page(request.app.openapi(), request.app.root_path), media_type="text/html")


class _MetricsText(Response):
    media_type = CONTENT_TYPE


@probes.get("/metrics", summary="For Prometheus", response_class=_MetricsText)
async def metrics(request: Request) -> Response:
    return _MetricsText(_gateway(request).metrics.render())


# --- the OpenAI API -----------------------------------------------------------------------------------------------

EVENTS = {"text/event-stream": {"schema": {"type": "string"}, "example": 'data: {"id": ...}\n\ndata: [DONE]\n\n'}}


@api.get("/v1/models", tags=["models"], response_model=answers.ModelList)
async def models(request: Request) -> Response:
    gateway = _gateway(request)
    data = [card for model in gateway.models for card in (gateway.card(model), *adapters.cards(gateway, model))]
    return _json({"object": "list", "data": data})


@api.get("/v1/models/{name:path}", tags=["models"], response_model=answers.ModelCard)
async def model(request: Request, name: str) -> Response:
    gateway = _gateway(request)
    model = gateway.find(name)
    return _json(next((card for card in adapters.cards(gateway, model) if card["id"] == name), gateway.card(model)))


@api.post("/v1/load_lora_adapter", tags=["models"], summary="Where the server was started with --lora-loading")
async def load_lora_adapter(request: Request, body: adapters.LoadAdapter) -> Response:
    return await adapters.load(_gateway(request), body)


@api.post("/v1/unload_lora_adapter", tags=["models"], summary="Where the server was started with --lora-loading")
async def unload_lora_adapter(request: Request, body: adapters.UnloadAdapter) -> Response:
    return await adapters.unload(_gateway(request), body)


@api.post(
    "/v1/chat/completions", tags=["generation"], responses={200: {"model": answers.ChatCompletion, "content": EVENTS}}
)
async def chat_completions(request: Request, body: schema.ChatRequest) -> Response:
    return await chat(_service(request, body.model), body)


@api.post("/v1/completions", tags=["generation"], responses={200: {"model": answers.Completion, "content": EVENTS}})
async def completions(request: Request, body: schema.CompletionRequest) -> Response:
    return await complete(_service(request, body.model), body)


@api.post("/v1/responses", tags=["generation"], responses={200: {"model": answers.ResponseAnswer, "content": EVENTS}})
async def responses(request: Request, body: schema.ResponsesRequest) -> Response:
    return await respond(_service(request, body.model), body)


NOT_HERE = {
    "/v1/embeddings": "this server generates text, and embeds none: use a server of an embedding model, such as "
    "text-embeddings-inference, at another address",
    "/v1/responses/{response_id}": "nothing is stored here: a response is told once, as POST /v1/responses' answer",
}


async def _not_here(request: Request) -> Response:
    raise ApiError(404, NOT_HERE[request.scope["route"].path], code="not_supported")


for _path in NOT_HERE:
    api.add_api_route(_path, _not_here, methods=["GET", "POST", "DELETE"], include_in_schema=False)


@api.post("/tokenize", tags=["tokens"], response_model=answers.TokenizeResponse)
async def tokenize(request: Request, body: schema.TokenizeRequest) -> Response:
    service = _service(request, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt, a text, or messages, a conversation", param="prompt")
    if body.messages is not None:
        tokens = await service.prompts.tokens(as_messages(body.messages), "messages")
    else:
        tokens = await service.prompts.tokens(body.prompt or "", "prompt")
    return _json({"count": len(tokens), "max_model_len": service.engine.info.max_model_len, "tokens": tokens})


@api.post("/detokenize", tags=["tokens"], response_model=answers.DetokenizeResponse)
async def detokenize(request: Request, body: schema.DetokenizeRequest) -> Response:
    service = _service(request, body.model)
    (text,) = await service.prompts.decode([body.tokens], "tokens")
    return _json({"prompt": text})


def _end_this_process() -> None:
    # The server's own way to stop; it then ends by the signal, and whoever supervises it sees that.
    signal.raise_signal(signal.SIGTERM)


app = create_app(on_engine_death=_end_this_process)
