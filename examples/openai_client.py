"""Asks a mini-infer server with OpenAI's Python client.

mini-infer-serve --model tiny-target &
python examples/openai_client.py --url http://localhost:8000
"""

from __future__ import annotations

import argparse
import asyncio

from openai import AsyncOpenAI, OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--api-key", default="none", help="where the server has one")
    args = parser.parse_args()

    client = OpenAI(base_url=f"{args.url}/v1", api_key=args.api_key)
    model = client.models.list().data[0].id
    print(f"model: {model}\n")

    # A chat, streamed. The last chunk brings the usage.
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Write a function that adds two numbers."}],
        max_tokens=48,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n[{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens]\n")

    # A completion with what goes beyond OpenAI's API.
    answer = client.completions.create(
        model=model,
        prompt="def fibonacci(n):",
        max_tokens=24,
        extra_body={"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05},
    )
    print(repr(answer.choices[0].text), "\n")

    # An answer that follows a schema.
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "arguments": {"type": "integer", "maximum": 9}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Describe a function."}],
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "function", "schema": schema}},
    )
    print(answer.choices[0].message.content, "\n")

    print("eight at once:", asyncio.run(many(args.url, args.api_key, model)))


async def many(url: str, api_key: str, model: str) -> list[int]:
    """The lengths of several answers, which the server computes in one batch."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key) as client:
        asked = [client.completions.create(model=model, prompt=f"x = {i}\n", max_tokens=16, seed=i) for i in range(8)]
        return [len(answer.choices[0].text) for answer in await asyncio.gather(*asked)]


if __name__ == "__main__":
    main()
