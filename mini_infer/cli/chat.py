"""mini-infer-chat: a conversation in the terminal, with a running server or one of its own."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from mini_infer.cli.arguments import command_parser, refuse
from mini_infer.cli.serve import parse, remarks
from mini_infer.cli.server_process import discard, read_address, start_server
from mini_infer.core.errors import MiniInferError

NAME = "mini-infer-chat"
DESCRIPTION = """\
Talks with a model, keeps the conversation, and shows the answer as it comes.

  mini-infer-chat                                 starts a server of its own with tiny-target
  mini-infer-chat PATH                            ... with another model; all flags of mini-infer-serve are taken
  mini-infer-chat --url http://localhost:8000     talks with a server that runs already

In the conversation: /reset forgets it, /quit (or Ctrl-D) ends, Ctrl-C stops an answer.
"""


class ChatError(MiniInferError):
    """The server cannot be started or asked, or refuses."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    args, serve_flags = _parser().parse_known_args(argv)
    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  # gives `input` its line editing
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every character of an answer
    try:
        if args.url is None:
            with own_server(serve_flags) as url:
                converse(url, args)
        elif serve_flags:
            raise ChatError(f"unknown argument {serve_flags[0]!r}: with --url, the server has its own settings already")
        else:
            converse(args.url.rstrip("/"), args)
    except KeyboardInterrupt:
        return 0
    except MiniInferError as error:
        return refuse(NAME, error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(NAME, DESCRIPTION)
    parser.add_argument("--url", help="of a running server")
    parser.add_argument(
        "--api-key", default=os.environ.get("MINI_INFER_API_KEY"), help="the server's. [MINI_INFER_API_KEY]"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message, before the conversation")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of an answer. Default: up to the model's length")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy. Default: 1")
    return parser


@contextlib.contextmanager
def own_server(flags: Sequence[str]) -> Iterator[str]:
    """A server with these flags, for as long as the context is open; yields its address.

    Raises:
        ConfigError, ModelError, ChatError: it does not start, which the last one tells with what it said; or its model
            takes no conversations.
    """
    for remark in remarks(parse(flags)):
        instead = "name the missing one (--model.tokenizer, --chat-template), or choose another model"
        raise ChatError(f"{remark}. A conversation takes both: {instead}")
    with tempfile.TemporaryFile("w+", prefix="mini-infer-chat-") as said:
        # In a session of its own: Ctrl-C stops an answer, not the server.
        process = start_server([*flags, "--port", "0"], stderr=said, start_new_session=True)
        assert process.stdout is not None
        try:
            print("starting the model ...", file=sys.stderr)
            url = read_address(process.stdout)
            if url is None:
                said.seek(0)
                raise ChatError(f"the server did not start:\n{said.read().strip()}")
            discard(process.stdout)
            yield url
        finally:
            process.terminate()
            process.wait()


def converse(url: str, args: argparse.Namespace) -> None:
    """Reads turns from the terminal until there are no more."""
    model = _model(url, args.api_key)
    print(f"{model} at {url}; /reset forgets the conversation, /quit ends", file=sys.stderr)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    history = list(opening)
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            print()
            return
        if said == "/quit":
            return
        if said == "/reset":
            history = list(opening)
        elif said:
            turn = {"role": "user", "content": said}
            try:
                answer = _show(answer_pieces(url, [*history, turn], args))
            except ChatError as error:  # the turn is forgotten, and the conversation goes on
                print(f"error: {error}", file=sys.stderr)
                continue
            history += [turn, {"role": "assistant", "content": answer}]


def _show(pieces: Iterator[str]) -> str:
    answer = []
    try:
        for piece in pieces:
            answer.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print()
    return "".join(answer)


def answer_pieces(url: str, messages: list[dict[str, str]], args: argparse.Namespace) -> Iterator[str]:
    """The answer's text as it comes. Leaving early closes the connection, which ends the request.

    Raises:
        ChatError: the server refuses, or fails on the way.
    """
    chosen = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    with _open(url, "/v1/chat/completions", args.api_key, {"messages": messages, "stream": True, **chosen}) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if not data:
                continue
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ChatError(event["error"]["message"])
            yield event["choices"][0]["delta"].get("content") or ""
    raise ChatError("the answer ended in the middle: the server has gone")


def _model(url: str, api_key: str | None) -> str:
    with _open(url, "/v1/models", api_key) as response:
        return json.load(response)["data"][0]["id"]


def _open(url: str, path: str, api_key: str | None, body: dict[str, Any] | None = None) -> Any:
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(url + path, data, headers))
    except urllib.error.HTTPError as error:
        raise ChatError(_message(error)) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ChatError(f"no server answers at {url} ({reason}): start one with mini-infer-serve") from error


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code} {error.reason}"


if __name__ == "__main__":
    sys.exit(main())
