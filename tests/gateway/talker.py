"""A tiny random model with a tokenizer of characters and a chat template in the manner of ChatML and Hermes.

Some answers are dictated: their tokens get a high logit, and rows come from the model as always. Some of
them are written on purpose as no tokenizer would write them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from router_replay.engines import EmbeddedEngine

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
# As Qwen3's: the thoughts of an answer are left out of the prompt once the user has spoken again.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}{% if message.role == "user" %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set text = message.content or "" %}
{%- if message.role == "assistant" and "</think>" in text and loop.index0 < last.user %}
{%- set text = text.split("</think>")[-1] %}{% endif %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ text }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ text | trim }}
{%- for call in message.tool_calls or [] %}{% if text or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
TIGHT = '{"name":"add","arguments":{"a":1,"b":2}}'
# What the user or the tool said last, and the pieces of the answer, each of which is tokenised by itself.
ANSWERS: dict[str, list[str]] = {
    "call": ["<tool_call>", "\n", CALL, "\n", "</tool_call>"],
    "tight": ["<tool_call>", TIGHT, "</tool_call>"],
    "broken": ["<tool_call>", '{"name": ', "</tool_call>"],
    "3": ["It", " is", " 3"],
    "drift": ["a", "b", "c"],  # the tokenizer would write ab, c
    "think": ["<think>", "hm", "</think>", "yes"],
    "count": list("1 2 3 4 5 6"),
    "hello": ["Hi"],
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models

    pieces = ["<|pad|>", *CHARACTERS, "ab"]
    model = models.BPE({piece: number for number, piece in enumerate(pieces)}, [("a", "b")])
    characters = Tokenizer(model)
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=TEMPLATE
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(MARKS)
    return tokenizer


def save_talker(folder: pathlib.Path) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=1024, tie_word_embeddings=False, pad_token_id=0,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def answer_of(tokenizer: Any, said: str) -> list[int]:
    """The tokens of the answer to what was said last; none if the model may say what it likes."""
    pieces = ANSWERS.get(said)
    if pieces is None:
        return []
    tokens = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    return [*tokens, tokenizer.eos_token_id]


def dictate(engine: EmbeddedEngine, tokenizer: Any) -> None:
    """Make the taught answers near certain: the next token of one gets a high logit, in this engine only."""
    runner = engine._schedule._runner
    sample_as_always = runner._sample

    def sample(samples: Sequence[Any], logits: Any, *more: Any) -> None:
        logits = logits.clone()
        for row, one in enumerate(samples):
            text = tokenizer.decode(one.flight.request.token_ids)
            said = text.rpartition("<|im_start|>assistant")[0].rpartition("<|im_start|>user\n")[2]
            said = said.removeprefix("<tool_response>\n").strip()
            for mark in ("<|im_end|>", "</tool_response>"):
                said = said.removesuffix(mark).strip()
            rest = answer_of(tokenizer, said)[len(one.tokens) :]
            if rest:
                logits[row, rest[0]] += 100
        sample_as_always(samples, logits, *more)

    runner._sample = sample  # type: ignore[method-assign]
