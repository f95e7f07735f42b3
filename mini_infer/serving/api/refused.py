"""Fields that clients send and this server cannot honour: each is a 400 that says what to do instead, and none is
ignored. A field that is honoured is in schema.py; one that stands in neither is nobody's, and is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError

LEAVE_OUT = "leave it out"


class Refused(NamedTuple):
    instead: str = LEAVE_OUT
    harmless: tuple[Any, ...] = ()  # values that ask for what is done anyway


_STATELESS = Refused("nothing is stored here: leave it out, and send the whole conversation", (False,))
_TEXT_ALONE = Refused("this server understands and answers text alone: leave it out", (["text"],))
_CHOICES = "use `structured_outputs`, `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`"

OF_OPENAI = {
    "store": _STATELESS,
    "audio": _TEXT_ALONE,
    "modalities": _TEXT_ALONE,
    "service_tier": Refused("there is one tier: leave it out, or set `priority`", ("auto", "default")),
    "verbosity": Refused(f"say it in the prompt, and {LEAVE_OUT}", ("medium",)),
    "moderation": Refused(),
    "prediction": Refused("leave it out; a server with --speculation.method drafts by itself"),
    "web_search_options": Refused("leave it out, and give the model a function in `tools`"),
    "prompt_cache_options": Refused("prefixes are cached by themselves: leave it out, or set `cache_salt`"),
    "prompt_cache_retention": Refused("prefixes are kept while there is room: leave it out", ("in_memory",)),
    "functions": Refused("use `tools`, its successor"),
    "function_call": Refused("use `tool_choice`, its successor", ("none", "auto")),
    "suffix": Refused("write the model's own fill-in-the-middle markup into the prompt"),
}
OF_OTHER_SERVERS = {  # vLLM's, SGLang's
    "use_beam_search": Refused("leave it out, or ask for `n` completions", (False,)),
    "length_penalty": Refused("it belongs to beam search: leave it out", (1, 1.0)),
    "prompt_logprobs": Refused("ask /v1/completions with `echo` and `logprobs`"),
    "return_tokens_as_token_ids": Refused("ask /v1/completions with `return_token_ids`", (False,)),
    "spaces_between_special_tokens": Refused("it is always true: leave it out", (True,)),
    "documents": Refused("write them into a message"),
    "chat_template": Refused("start the server with --chat-template FILE"),
    "mm_processor_kwargs": _TEXT_ALONE,
    "guided_decoding_backend": Refused("llguidance is the one there is: leave it out", ("auto", "guidance")),
    "guided_whitespace_pattern": Refused("put it into the schema: {'x-guidance': {'whitespace_pattern': ...}}"),
    "structural_tag": Refused(_CHOICES),
    "regex": Refused("use `guided_regex`"),
    "ebnf": Refused("use `guided_grammar`, in Lark"),
    "json_schema": Refused("use `guided_json`, or `response_format`"),
    "stop_regex": Refused("use `stop`, or `guided_regex`"),
    "no_stop_trim": Refused("use `include_stop_str_in_output`", (False,)),
    "logits_processors": Refused("use `logit_bias`, or a grammar"),
    "custom_logit_processor": Refused("use `logit_bias`, or a grammar"),
    "custom_params": Refused(),
    "kv_transfer_params": Refused(),
    "vllm_xargs": Refused(),
    "thinking_token_budget": Refused("use `max_tokens`, or what `chat_template_kwargs` offers"),
    "separate_reasoning": Refused("set `include_reasoning`, or start the server with --reasoning-format none", (True,)),
    "stream_reasoning": Refused("it is always true: leave it out", (True,)),
    "prompt_embeds": Refused("send text or token ids"),
    "input_ids": Refused("send them as the `prompt` of /v1/completions"),
    "lora_path": Refused("one server serves one model: leave it out"),
    "session_params": _STATELESS,
    "return_hidden_states": Refused(LEAVE_OUT, (False,)),
    "add_special_tokens": Refused("a chat template has them: leave it out", (False,)),
}
OF_CHAT = {
    "return_token_ids": Refused("ask /v1/completions", (False,)),
    "echo": Refused("ask /v1/completions", (False,)),
}
OF_COMPLETIONS = {
    "tools": Refused("ask /v1/chat/completions"),
    "messages": Refused("ask /v1/chat/completions"),
    "add_special_tokens": Refused("send token ids: /tokenize makes them", (True,)),
}
OF_RESPONSES = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "background": _STATELESS,
    "prompt": Refused("there are no stored prompts: send `instructions` and `input`"),
    "truncation": Refused("send fewer items, or use /v1/chat/completions with `truncate_prompt_tokens`", ("disabled",)),
    "max_tool_calls": Refused("it is for tools that the server runs, and here it runs none: leave it out"),
    "context_management": Refused("leave it out, and send fewer items"),
    "include": Refused(
        "leave it out; /v1/chat/completions has `logprobs`",
        (["reasoning.encrypted_content"],),  # it comes in plain
    ),
    "n": Refused("ask /v1/chat/completions", (1,)),
    "logprobs": Refused("ask /v1/chat/completions", (False,)),
    "messages": Refused("send them as `input`"),
    "max_tokens": Refused("use `max_output_tokens`"),
    "max_completion_tokens": Refused("use `max_output_tokens`"),
    "response_format": Refused("use `text`: {format: ...}"),
    "reasoning_effort": Refused("use `reasoning`: {effort: ...}"),
    "top_logprobs": Refused("ask /v1/chat/completions", (0,)),
    "access_programs": Refused(),
    "image": _TEXT_ALONE,
}


def check(fields: Mapping[str, Any], refused: Mapping[str, Refused]) -> None:
    """Raises PydanticCustomError, of type "refused", at the first field that cannot be honoured."""
    for name in refused:
        if name in fields and fields[name] not in (None, [], {}, "", *refused[name].harmless):
            about = {"field": name, "instead": refused[name].instead}
            raise PydanticCustomError("refused", "not supported: {instead}", about)
