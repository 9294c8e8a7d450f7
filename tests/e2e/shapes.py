"""What clients may ask for, as a table: features × chat or completion × streamed or not.

A shape says how to change a plain request. Where it needs to know what the model will
say (a stop string that is really hit), it gets stock's own plain answer as `Plain`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.cluster import MODEL
from tests.e2e.prompts import text_prompt, token_prompt

CHAT, COMPLETION = "chat", "completion"
BOTH = (CHAT, COMPLETION)
EOS, COMMON = 2, 17  # token ids of the tiny model: its end, and any other

Body = dict[str, Any]


@dataclass(frozen=True)
class Plain:
    """The plain answer of stock: its token ids and the text of each."""

    token_ids: list[int]
    pieces: list[str]


Change = Body | Callable[[Plain], Body]
Check = Callable[[Any], Any]


@dataclass(frozen=True)
class Shape:
    """One feature."""

    name: str  # of the test
    change: Change = field(default_factory=dict)  # of the plain request; `...` removes a key
    kinds: tuple[str, ...] = BOTH  # where it applies
    streams: tuple[bool, ...] = (False, True)  # how it is asked
    status: int = 200  # what stock says
    check: Check = lambda _: True  # whether stock's answer has what the shape is about
    is_split: bool | None = True  # whether two instances share it; None if either will do


def body_of(shape: Shape, kind: str, stream: bool, plain: Plain) -> Body:
    """The request, ready to be sent."""
    change = shape.change(plain) if callable(shape.change) else shape.change
    body = {**plain_body(kind), **({"stream": True} if stream else {}), **change}
    return {key: value for key, value in body.items() if value is not ...}


def plain_body(kind: str) -> Body:
    """Greedy, more than one chunk and more than one block, twelve tokens."""
    asked = {"messages": user(text_prompt(60))} if kind == CHAT else {"prompt": token_prompt(150)}
    return {"model": MODEL, **asked, "max_tokens": 12, "temperature": 0}


def user(text: str) -> list[Body]:
    return [{"role": "user", "content": text}]


def is_json_like(answer: Any) -> bool:
    return bool(answer["choices"][0]["text"].lstrip().startswith("{"))


def ended_by(reason: str) -> Check:
    return lambda answer: {each["finish_reason"] for each in answer["choices"]} == {reason}


def num_tokens(count: int) -> Check:
    return lambda answer: answer["usage"] is None or answer["usage"]["completion_tokens"] == count


def has_call(answer: Any) -> bool:
    return bool(answer["choices"][0]["tool_calls"])


def hit(before: int) -> Check:
    """Ended by a stop, after that many characters or fewer."""
    return lambda answer: ended_by("stop")(answer) and len(answer["choices"][0]["text"]) <= before


UNIT = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": UNIT, "strict": True},
    }
    for name in ("weather", "clock")
]
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"unit": "celsius"}}\n</tool_call>'
CALLS = [
    {
        "id": "call-1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"unit": "celsius"}'},
    }
]
HISTORY = [
    {"role": "system", "content": "Be brief."},
    *user("What is a license?"),
    {"role": "assistant", "content": "A grant of rights."},
    *user(text_prompt(40)),
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "unit", "schema": UNIT}}
ANSWER = [{"role": "assistant", "content": "The work"}]


def _stop(pick: Callable[[list[str]], Any], **more: Any) -> Callable[[Plain], Body]:
    return lambda plain: {"stop": pick(plain.pieces), **more}


def _first(pieces: list[str]) -> str:
    return pieces[0]


def _across(pieces: list[str]) -> str:
    return pieces[0][-1] + pieces[1][:1]


def _inside(pieces: list[str]) -> str:
    return (pieces[4] + pieces[5])[1:]


_SAMPLED: Body = {"temperature": 1.0, "seed": 11}
_STRUCTURED: Body = {"max_tokens": 30}

GENERATION = (
    Shape("plain"),
    Shape("as if by default", {"temperature": 1, "seed": 3, "max_tokens": ...}, (COMPLETION,)),
    Shape("max_completion_tokens", {"max_tokens": ..., "max_completion_tokens": 5}, (CHAT,)),
    Shape("max_tokens 1", {"max_tokens": 1}, check=num_tokens(1)),
    Shape("max_tokens 2", {"max_tokens": 2}, check=num_tokens(2)),
    Shape("max_tokens 3", {"max_tokens": 3}, check=num_tokens(3)),
    Shape("seed", _SAMPLED),
    Shape("another seed", {**_SAMPLED, "seed": 12}),
    Shape("negative seed", {**_SAMPLED, "seed": -5}),
    Shape("top_p", {**_SAMPLED, "top_p": 0.6}),
    Shape("top_k", {**_SAMPLED, "top_k": 5}),
    Shape("top_k 1", {**_SAMPLED, "top_k": 1}),
    Shape("min_p", {**_SAMPLED, "min_p": 0.2}),
    Shape("high temperature", {**_SAMPLED, "temperature": 1.9}),
    Shape("n 1", {"n": 1}),
    Shape("n 3", {**_SAMPLED, "n": 3}, check=lambda answer: len(answer["choices"]) == 3),
    Shape("n 2 with logprobs", lambda _: {**_SAMPLED, "n": 2}),
    Shape("n 2 and one token", {**_SAMPLED, "n": 2, "max_tokens": 1}, is_split=False),
    Shape("n 3 that end at once or later", {**_SAMPLED, "n": 3, "logit_bias": {str(EOS): 6.0}}),
    Shape("all penalties", {"frequency_penalty": 1.2, "presence_penalty": 0.4,
          "repetition_penalty": 1.3}),
    Shape("all penalties with logprobs", {"frequency_penalty": 1.2, "presence_penalty": 0.4,
          "logprobs": 1, "return_token_ids": True}),
    Shape("presence_penalty", {"presence_penalty": 1.5}),
    Shape("frequency_penalty", {"frequency_penalty": 1.5}),
    Shape("repetition_penalty", {"repetition_penalty": 1.4}),
    Shape("penalty on a first token that repeats", {"frequency_penalty": 2.0,
          "logit_bias": {str(COMMON): 6.0}}),
    Shape("logit_bias", {"logit_bias": {str(COMMON): 100}}),
    Shape("allowed_token_ids", {"allowed_token_ids": list(range(300, 340))}),
    Shape("bad_words", lambda plain: {"bad_words": [plain.pieces[1].strip() or "the"]}),
    Shape("bad_words that ban the first token",
          lambda plain: {"bad_words": [plain.pieces[0].strip() or "the"]}),
    Shape("user and an unknown field", {"user": "me", "no_such_field": 1, "metadata": {}}),
    Shape("best_of is unknown", {"best_of": 2}, is_split=False),
    Shape("cache_salt", {"cache_salt": "salt"}),
    Shape("stream_interval", {"stream_interval": 3}),
    Shape("priority", {"priority": 5}),
    Shape("session_id", {"session_id": "s"}),
    Shape("client's kv_transfer_params", {"kv_transfer_params": {}}),
)  # fmt: skip

ENDS = (
    Shape("stop at the first token", _stop(_first), check=hit(0)),
    Shape("stop in a list", _stop(lambda p: ["never, never", p[2]]), check=ended_by("stop")),
    Shape("stop across the first tokens", _stop(_across), check=hit(8)),
    Shape("stop inside", _stop(_inside), check=ended_by("stop")),
    Shape("stop that never comes", {"stop": ["never, never"]}, check=ended_by("length")),
    Shape("stop at the first token, kept", _stop(_first, include_stop_str_in_output=True),
          check=ended_by("stop")),
    Shape("stop across, kept", _stop(_across, include_stop_str_in_output=True),
          check=ended_by("stop")),
    Shape("stop inside, kept", _stop(_inside, include_stop_str_in_output=True),
          check=ended_by("stop")),
    Shape("stop after min_tokens", _stop(_first, min_tokens=6)),
    Shape("stop_token_ids at the first token",
          lambda plain: {"stop_token_ids": plain.token_ids[:1]}, check=num_tokens(1)),
    Shape("stop_token_ids later", lambda plain: {"stop_token_ids": plain.token_ids[3:4]},
          check=ended_by("stop")),
    Shape("stop_token_ids after min_tokens", lambda plain: {"stop_token_ids": plain.token_ids[:1],
          "min_tokens": 6}),
    Shape("the end at once", {"logit_bias": {str(EOS): 100}}, check=num_tokens(1)),
    Shape("the end at once, shown", {"logit_bias": {str(EOS): 100}, "skip_special_tokens": False},
          check=num_tokens(1)),
    Shape("ignore_eos", {"logit_bias": {str(EOS): 100}, "ignore_eos": True,
          "skip_special_tokens": False}, check=num_tokens(12)),
    Shape("ignore_eos, not shown", {"logit_bias": {str(EOS): 100}, "ignore_eos": True,
          "max_tokens": 4}, check=num_tokens(4)),
    Shape("min_tokens before the end", {"logit_bias": {str(EOS): 100}, "min_tokens": 4},
          check=num_tokens(5)),
    Shape("repetition_detection", {"logit_bias": {str(COMMON): 100},
          "repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 3}}),
)  # fmt: skip

LOGPROBS = (
    *(Shape(f"logprobs {k}", {"logprobs": k}, (COMPLETION,)) for k in (0, 1, 5)),
    *(Shape(f"top_logprobs {k}", {"logprobs": True, "top_logprobs": k}, (CHAT,))for k in (0, 1,
          5)),
    Shape("logprobs of samples", {**_SAMPLED, "logprobs": 2}, (COMPLETION,)),
    Shape("logprobs of samples", {**_SAMPLED, "logprobs": True, "top_logprobs": 2}, (CHAT,)),
    Shape("logprobs of choices", {**_SAMPLED, "logprobs": 1, "n": 2}, (COMPLETION,)),
    Shape("logprobs of choices", {**_SAMPLED, "logprobs": True, "top_logprobs": 1, "n": 2}, (CHAT,
          )),
    Shape("logprobs of one token", {"logprobs": 1, "max_tokens": 1}, (COMPLETION,)),
    Shape("logprobs of one token", {"logprobs": True, "top_logprobs": 1, "max_tokens": 1}, (CHAT,)),
    Shape("logprobs and a stop inside", lambda plain: {"logprobs": 1,
          "stop": _inside(plain.pieces)}, (COMPLETION,), check=ended_by("stop")),
    Shape("logprob_token_ids", {"logprobs": 1, "logprob_token_ids": [5, COMMON, 99]}, (COMPLETION,
          )),
    Shape("logprob_token_ids", {"logprobs": True, "logprob_token_ids": [5, COMMON, 99]}, (CHAT,)),
    Shape("tokens as ids", {"logprobs": 2, "return_tokens_as_token_ids": True}, (COMPLETION,)),
    Shape("tokens as ids", {"logprobs": True, "top_logprobs": 2,
          "return_tokens_as_token_ids": True}, (CHAT,)),
    Shape("echo", {"echo": True, "prompt": text_prompt(30)}, (COMPLETION,), is_split=False),
    Shape("echo with logprobs", {"echo": True, "prompt": text_prompt(30), "logprobs": 1},
          (COMPLETION,), is_split=False),
    Shape("echo alone", {"echo": True, "prompt": text_prompt(30), "max_tokens": 0}, (COMPLETION,),
          is_split=False),
    Shape("echo of a message", {"echo": True, "messages": user("Go on.") + ANSWER}, (CHAT,),
          is_split=False),
    Shape("prompt_logprobs", {"prompt_logprobs": 2}, streams=(False,), is_split=False),
    Shape("prompt_logprobs 0", {"prompt_logprobs": 0}, streams=(False,), is_split=False),
)  # fmt: skip

CONSTRAINED = (
    Shape("json_object", {**_STRUCTURED, "response_format": {"type": "json_object"}},
          check=is_json_like),
    Shape("json_schema", {**_STRUCTURED, "response_format": SCHEMA}, check=is_json_like),
    Shape("json_schema sampled", {**_STRUCTURED, **_SAMPLED, "response_format": SCHEMA}),
    Shape("response_format text", {"response_format": {"type": "text"}}),
    Shape("regex", {"structured_outputs": {"regex": "(yes|no), [0-9]{4}"}}),
    Shape("regex sampled", {**_SAMPLED, "structured_outputs": {"regex": "[a-f]{3} [0-9]{4}"}}),
    Shape("choice", {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}),
    Shape("choice of one token", {"structured_outputs": {"choice": ["a", "b"]}}),
    Shape("json", {**_STRUCTURED, "structured_outputs": {"json": UNIT}}, check=is_json_like),
    Shape("grammar", {"structured_outputs": {"grammar": 'root ::= "x" [0-9]+ "y"'}}),
    Shape("choices of one schema", {**_STRUCTURED, **_SAMPLED, "n": 2, "response_format": SCHEMA}),
    Shape("regex with logprobs", {"logprobs": 1,
          "structured_outputs": {"regex": "(yes|no), [0-9]{4}"}}, (COMPLETION,)),
)  # fmt: skip

CALLING = (
    Shape("tools unused", {"tools": TOOLS}, (CHAT,)),
    Shape("tool_choice none", {"tools": TOOLS, "tool_choice": "none"}, (CHAT,)),
    Shape("tool_choice auto that calls", {"tools": TOOLS, "tool_choice": "auto",
          "structured_outputs": {"choice": [CALL_TEXT]}, "max_tokens": 200}, (CHAT,),
          check=has_call),
    Shape("tool_choice auto that talks", {"tools": TOOLS, "tool_choice": "auto",
          "structured_outputs": {"choice": ["no, thanks"]}}, (CHAT,)),
    Shape("tool_choice required", {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200},
          (CHAT,), check=has_call),
    Shape("tool_choice named", {"tools": TOOLS, "tool_choice": {"type": "function",
          "function": {"name": "clock"}}, "max_tokens": 200}, (CHAT,), check=has_call),
    Shape("tool_choice required, cut short", {"tools": TOOLS, "tool_choice": "required",
          "max_tokens": 1}, (CHAT,), is_split=None),
    Shape("choices that call", {**_SAMPLED, "n": 2, "tools": TOOLS, "tool_choice": "required",
          "max_tokens": 200}, (CHAT,), check=has_call),
    Shape("the answer of a tool", {"tools": TOOLS, "messages": [*user("How warm is it?"),
          {"role": "assistant", "content": None, "tool_calls": CALLS}, {"role": "tool",
          "tool_call_id": "call-1", "content": "21"}]}, (CHAT,)),
)  # fmt: skip

PROMPTS = (
    Shape("text", {"prompt": text_prompt(50)}, (COMPLETION,)),
    Shape("long text", {"prompt": text_prompt(500)}, (COMPLETION,)),
    Shape("long messages", {"messages": user(text_prompt(500))}, (CHAT,)),
    Shape("long ids", {"prompt": token_prompt(1500)}, (COMPLETION,)),
    Shape("one id", {"prompt": [COMMON]}, (COMPLETION,)),
    Shape("one word", {"prompt": "the"}, (COMPLETION,)),
    Shape("unicode", {"prompt": "Grüße, 世界! \u00a0 naïve e\u0301"}, (COMPLETION,)),
    Shape("emoji", {"prompt": "👩‍👩‍👧 🎉" * 12}, (COMPLETION,)),
    Shape("emoji", {"messages": user("👩‍👩‍👧 🎉 Grüße" * 12)}, (CHAT,)),
    Shape("text of broken characters", {"allowed_token_ids": list(range(190, 250)),
          "return_token_ids": True}),
    Shape("two texts", {"prompt": [text_prompt(30), text_prompt(9)]}, (COMPLETION,),
          is_split=False),
    Shape("two id lists", {"prompt": [[5, 6, 7], [8, 9]]}, (COMPLETION,), is_split=False),
    Shape("a text in a list", {"prompt": [text_prompt(30)]}, (COMPLETION,), is_split=False),
    Shape("choices of two texts", {**_SAMPLED, "prompt": [text_prompt(30), "the"], "n": 2},
          (COMPLETION,), is_split=False),
    Shape("truncated", {"truncate_prompt_tokens": 20, "prompt": text_prompt(50)}, (COMPLETION,)),
    Shape("truncated", {"truncate_prompt_tokens": 20}, (CHAT,)),
    Shape("truncated from the right", {"truncate_prompt_tokens": 20, "truncation_side": "right",
          "prompt": text_prompt(50)}, (COMPLETION,)),
    Shape("truncated to the window", {"truncate_prompt_tokens": -1}),
    Shape("no special tokens", {"add_special_tokens": False}),
    Shape("special tokens", {"add_special_tokens": True}),
    Shape("special tokens as text", {"prompt": "<|start|>user\nhello<|end|>\n"}, (COMPLETION,)),
    Shape("several turns", {"messages": HISTORY}, (CHAT,)),
    Shape("content in parts", {"messages": [{"role": "user", "content": [{"type": "text",
          "text": text_prompt(30)}]}]}, (CHAT,)),
    Shape("a message that goes on", {"messages": user("Go on.") + ANSWER,
          "continue_final_message": True, "add_generation_prompt": False}, (CHAT,)),
    Shape("no generation prompt", {"add_generation_prompt": False}, (CHAT,)),
    Shape("chat_template_kwargs", {"chat_template_kwargs": {"colour": "red"}}, (CHAT,)),
)  # fmt: skip

RETURNS = (
    Shape("token ids", {"return_token_ids": True}),
    Shape("token ids of choices", {**_SAMPLED, "return_token_ids": True, "n": 2}),
    Shape("token ids of one token", {"return_token_ids": True, "max_tokens": 1}),
    Shape("prompt text", {"return_prompt_text": True}, (CHAT,)),
    Shape("special tokens shown", {"skip_special_tokens": False}),
    Shape("usage", {"stream_options": {"include_usage": True}}, streams=(True,)),
    Shape("usage of one token", {"stream_options": {"include_usage": True}, "max_tokens": 1},
          streams=(True,)),
    Shape("usage of an end at once", {"stream_options": {"include_usage": True},
          "logit_bias": {str(EOS): 100}}, streams=(True,)),
    Shape("usage of choices", {**_SAMPLED, "stream_options": {"include_usage": True}, "n": 2},
          streams=(True,)),
    Shape("usage all along", {"stream_options": {"include_usage": True,
          "continuous_usage_stats": True}}, streams=(True,)),
    Shape("usage all along with logprobs", {"stream_options": {"include_usage": True,
          "continuous_usage_stats": True}, "logprobs": 1, "return_token_ids": True}, streams=(True,
          )),
    Shape("everything at once", lambda plain: {**_SAMPLED, "logprobs": 2, "return_token_ids": True,
          "top_p": 0.9, "presence_penalty": 0.5, "stop": ["never, never"],
          "stream_options": {"include_usage": True}}, (COMPLETION,), (True,)),
    Shape("beam search", {"use_beam_search": True, "n": 2, "max_tokens": 5}, (COMPLETION,),
          (False,), is_split=False),
    Shape("beam search", {"use_beam_search": True, "n": 2, "max_tokens": 5}, (CHAT,),
          is_split=False),
)  # fmt: skip

SHAPES = (*GENERATION, *ENDS, *LOGPROBS, *CONSTRAINED, *CALLING, *PROMPTS, *RETURNS)


def _wrong(name: str, change: Body, kinds: tuple[str, ...] = BOTH, status: int = 400) -> Shape:
    return Shape(name, change, kinds, status=status)


WRONG = (
    _wrong("greedy choices", {"n": 2}),
    _wrong("n 0", {"n": 0}),
    _wrong("stream_options text", {"stream": True, "stream_options": "abc"}),
    _wrong("kv_transfer_params text", {"kv_transfer_params": "x"}),
    _wrong("n negative", {"n": -1}),
    _wrong("n huge", {"n": 10**6, "temperature": 1}),
    _wrong("n text", {"n": "two"}),
    _wrong("max_tokens 0", {"max_tokens": 0}),
    _wrong("max_tokens negative", {"max_tokens": -1}),
    _wrong("max_tokens text", {"max_tokens": "many"}),
    _wrong("min_tokens above max_tokens", {"min_tokens": 20}),
    _wrong("temperature negative", {"temperature": -1}),
    _wrong("temperature text", {"temperature": "hot"}),
    _wrong("top_p above 1", {"top_p": 2}),
    _wrong("top_k too small", {"top_k": -5}),
    _wrong("min_p above 1", {"min_p": 2}),
    _wrong("presence_penalty too large", {"presence_penalty": 3}),
    _wrong("frequency_penalty too small", {"frequency_penalty": -3}),
    _wrong("repetition_penalty 0", {"repetition_penalty": 0}),
    _wrong("seed too large", {"seed": 2**64}),
    _wrong("logprobs below -1", {"logprobs": -2}, (COMPLETION,)),
    _wrong("logprobs beyond the bound", {"logprobs": 1000}, (COMPLETION,)),
    _wrong("top_logprobs alone", {"top_logprobs": 2}, (CHAT,)),
    _wrong("top_logprobs below -1", {"logprobs": True, "top_logprobs": -2}, (CHAT,)),
    _wrong("top_logprobs beyond the bound", {"logprobs": True, "top_logprobs": 1000}, (CHAT,)),
    _wrong("logprobs text", {"logprobs": "all"}, (COMPLETION,)),
    _wrong("prompt_logprobs below -1", {"prompt_logprobs": -2}),
    Shape("prompt_logprobs streamed", {"prompt_logprobs": 2}, streams=(True,), status=400),
    Shape("stream_options alone", {"stream_options": {"include_usage": True}}, streams=(False,),
          status=400),
    _wrong("stream text", {"stream": "perhaps"}),
    _wrong("stop number", {"stop": 5}),
    _wrong("stop empty", {"stop": ""}),
    _wrong("logit_bias out of range", {"logit_bias": {"99999": 1}}),
    _wrong("logit_bias word", {"logit_bias": {"the": 1}}),
    _wrong("allowed_token_ids empty", {"allowed_token_ids": []}),
    _wrong("allowed_token_ids out of range", {"allowed_token_ids": [99999]}),
    _wrong("stop_token_ids text", {"stop_token_ids": ["a"]}),
    _wrong("bad_words number", {"bad_words": [5]}),
    _wrong("suffix", {"suffix": "end"}, (COMPLETION,)),
    _wrong("response_format of no known type", {"response_format": {"type": "poem"}}),
    _wrong("json_schema without a schema", {"response_format": {"type": "json_schema"}}),
    _wrong("two constraints", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
    _wrong("no constraint", {"structured_outputs": {}}),
    _wrong("broken regex", {"structured_outputs": {"regex": "(a"}}),
    _wrong("choice empty", {"structured_outputs": {"choice": []}}),
    _wrong("tools that are none", {"tools": [{"type": "function"}]}, (CHAT,)),
    _wrong("tool_choice without tools", {"tool_choice": "required"}, (CHAT,)),
    _wrong("tool_choice of an unknown tool", {"tools": TOOLS, "tool_choice": {"type": "function",
          "function": {"name": "no"}}}, (CHAT,)),
    _wrong("tool_choice of no known kind", {"tools": TOOLS, "tool_choice": "maybe"}, (CHAT,)),
    _wrong("no prompt", {"prompt": ...}, (COMPLETION,)),
    _wrong("prompt null", {"prompt": None}, (COMPLETION,)),
    _wrong("prompt empty", {"prompt": ""}, (COMPLETION,)),
    _wrong("prompt of no ids", {"prompt": []}, (COMPLETION,)),
    _wrong("prompt number", {"prompt": 5}, (COMPLETION,)),
    _wrong("prompt object", {"prompt": {"a": 1}}, (COMPLETION,)),
    _wrong("prompt of mixed lists", {"prompt": [1, "a"]}, (COMPLETION,)),
    _wrong("prompt with an unknown id", {"prompt": [10**6]}, (COMPLETION,)),
    _wrong("prompt with a negative id", {"prompt": [-1]}, (COMPLETION,)),
    _wrong("prompt_embeds", {"prompt_embeds": "abc"}, (COMPLETION,)),
    _wrong("no messages", {"messages": ...}, (CHAT,)),
    _wrong("messages empty", {"messages": []}, (CHAT,)),
    _wrong("messages text", {"messages": "hello"}, (CHAT,)),
    _wrong("message without a role", {"messages": [{"content": "x"}]}, (CHAT,)),
    _wrong("goes on and begins anew", {"continue_final_message": True,
          "add_generation_prompt": True}, (CHAT,)),
    _wrong("priority text", {"priority": "high"}),
    _wrong("truncated below -1", {"truncate_prompt_tokens": -2}),
    _wrong("truncated beyond the window", {"truncate_prompt_tokens": 10**6}),
    _wrong("more than the window", {"max_tokens": 5000}),
    _wrong("prompt beyond the window", {"prompt": [5] * 3000}, (COMPLETION,)),
    _wrong("messages beyond the window", {"messages": user(text_prompt(3000))}, (CHAT,)),
    _wrong("unknown model", {"model": "unknown"}, status=404),
    _wrong("model number", {"model": 5}),
    _wrong("beam search streamed", {"use_beam_search": True, "n": 2, "stream": True}, (COMPLETION,
          )),
    _wrong("stream_interval 0", {"stream_interval": 0}),
    _wrong("cache_salt empty", {"cache_salt": ""}),
)  # fmt: skip
