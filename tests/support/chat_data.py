"""Chat templates and conversations for the tests of `zephon.ops.chat`, in the styles of the field."""

import functools
from pathlib import Path

from support import tokenizer_data

CHATML = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Adds a system message of its own, trims what is said, writes BOS.
HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] != 'system' %}
    {{- '<|start|>system<|sep|>\\n\\nYou help.' + '<|eot|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|sep|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|sep|>\\n\\n' }}
{%- endif %}"""

# Wants roles in turn; what the assistant says begins with a blank and ends with EOS.
INST = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"""

# Says itself what is to be learned.
GENERATION = """{% for message in messages %}{% if message['role'] == 'assistant' %}<|im_start|>assistant
{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}
{% else %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Takes thoughts out of all turns but the last, and offers tools.
THINKING = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
    {%- set content = message.content or '' %}
    {%- if not loop.last and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""

# Thoughts in a field of their own or in the words, tool results as users say them; says itself what is to be learned.
REASONING = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set state = namespace(searching=true, query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if state.searching and message.role == 'user' and message.content is string
           and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set state.searching = false %}{%- set state.query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}{%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > state.query and (loop.last or thoughts | length > 0) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ content ~ '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# No blanks between turns, thoughts cut off, the system's words first.
FULLWIDTH = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif -%}
{% set ns = namespace(system='') %}{%- for message in messages %}{%- if message['role'] == 'system' -%}
{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<|Assistant|>' + content + eos_token }}{%- endif %}
{%- endfor -%}{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""

# Headers as of Llama 3, the system's words taken off the front, tools for the first user, the date.
LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start|>system<|sep|>\\n\\n' + system + '<|eot|>' }}
{%- if tools is not none and tools %}
    {{- '<|start|>user<|sep|>\\n\\n' }}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- messages[0]['content'] | trim + '<|eot|>' }}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|sep|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|sep|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot|>' }}
    {%- else %}
        {{- '<|start|>ipython<|sep|>\\n\\n' }}
        {{- message.content | tojson if message.content is mapping or message.content is iterable and message.content
            is not string else message.content }}{{- '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|sep|>\\n\\n' }}{%- endif %}"""

# The tokens of turns are put together of pieces.
PIECES = """{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

STYLES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "inst": INST,
    "generation": GENERATION,
    "thinking": THINKING,
    "reasoning": REASONING,
    "fullwidth": FULLWIDTH,
    "llama": LLAMA,
    "pieces": PIECES,
}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start|>", "<|sep|>", "<|eot|>")
MORE_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MORE_SPECIAL += ("<|User|>", "<|Assistant|>", "<|user|>", "<|assistant|>", "<|system|>", "[INST]", "[/INST]")


@functools.cache
def chat_tokenizer(family: str = "gpt2", **options: bool) -> Path:
    """A tokenizer without a template; see `write_chat_tokenizer`."""
    name = "-".join(["chat", family, *(key for key, value in options.items() if value)])
    return write_chat_tokenizer(tokenizer_data.scratch() / name, None, family, **options)


def write_chat_tokenizer(
    folder: Path,
    template: str | list[dict[str, str]] | None,
    family: str = "gpt2",
    *,
    rstrip: bool = False,
    lstrip: bool = False,
    more: bool = False,
) -> Path:
    """A tokenizer of this family with special tokens for chat (with `more`, all of them), and a template."""
    tree = tokenizer_data.FAMILIES[family]()
    for token in ("<|bos|>", "<|eos|>", *SPECIAL, *(MORE_SPECIAL if more else ())):
        strips = {"rstrip": rstrip and token == "<|eot|>", "lstrip": lstrip and token == "<|im_end|>"}
        tree = tokenizer_data.add_token(tree, token, special=True, **strips)
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    return tokenizer_data.save(
        folder, tree, tokenizer_config=config | ({} if template is None else {"chat_template": template})
    )
