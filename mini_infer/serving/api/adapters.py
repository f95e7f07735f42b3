"""Adapters of the models: what lists say of them, and POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from msgspec.json import encode
from pydantic import Field
from starlette.responses import Response

from mini_infer.serving.api.errors import ApiError
from mini_infer.serving.api.gateway import Gateway, Model
from mini_infer.serving.api.schema import ApiModel

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^\S+$")]


class LoadAdapter(ApiModel):
    """`model` says which one it is for, where there are several."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]  # on the server's machine
    model: str | None = None


class UnloadAdapter(ApiModel):
    lora_name: Name
    model: str | None = None


async def load(gateway: Gateway, body: LoadAdapter) -> Response:
    """Errors: where it cannot be served, or the name is a model's. Nothing has changed then."""
    model = _allowed(gateway, body.model)
    if gateway.names_model(body.lora_name):
        raise ApiError(400, f"{body.lora_name!r} is the name of a model: choose another one", param="lora_name")
    async with gateway.changing_adapters():
        for other in gateway.models:
            if other is not model and body.lora_name in other.adapters:
                message = f"{body.lora_name!r} is an adapter of the model {other.name!r}: choose another name"
                raise ApiError(400, message, param="lora_name")
        await _change(gateway, model, body.lora_name, body.lora_path)
    return _done(f"adapter {body.lora_name!r} is loaded from {body.lora_path}")


async def unload(gateway: Gateway, body: UnloadAdapter) -> Response:
    """Requests that run finish with it."""
    model = _allowed(gateway, body.model)
    async with gateway.changing_adapters():
        if body.lora_name not in model.require().adapters:
            raise ApiError(404, f"there is no adapter {body.lora_name!r}", param="lora_name", code="model_not_found")
        await _change(gateway, model, body.lora_name, None)
    return _done(f"adapter {body.lora_name!r} is unloaded")


def _allowed(gateway: Gateway, name: str | None) -> Model:
    if not gateway.settings.lora_loading:
        raise ApiError(
            403, "this server's adapters are those of its flags: --lora-loading lets requests load others, from any "
            "folder that the server can read", code="not_enabled",
        )  # fmt: skip
    return gateway.find(name)


async def _change(gateway: Gateway, model: Model, name: str, path: str | None) -> None:
    """For the limits of the client's key it is a completion that is open until the engines have done it."""
    engine = model.require().engine
    give_back = gateway.callers.take(0, 1, lambda counted, by: gateway.count(counted, model.name, by))
    try:
        await engine.change_adapter(name, path)
    finally:
        give_back(0, 1)


def _done(message: str) -> Response:
    return Response(encode({"status": "success", "message": message}), media_type="application/json")


def cards(gateway: Gateway, model: Model) -> Iterator[dict[str, Any]]:
    """Of a model's adapters, beside its own."""
    for name, path in model.adapters.items():
        yield gateway.card(model, id=name, root=path, parent=model.name)
