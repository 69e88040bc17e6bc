"""Chat templates and conversations for the tests of `zephon.ops.chat`, in the styles of the field."""

import json
from pathlib import Path

import tokenizer_data

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

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "inst": INST, "generation": GENERATION, "thinking": THINKING}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start|>", "<|sep|>", "<|eot|>")


def write_chat_tokenizer(folder: Path, template: str | None, family: str = "gpt2", *, rstrip: bool = False) -> Path:
    """A tokenizer of this family with special tokens for chat, and a template in its config."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = tokenizer_data.FAMILIES[family]()
    for token in ("<|bos|>", "<|eos|>", *SPECIAL):
        tree = tokenizer_data.add_token(tree, token, special=True, rstrip=rstrip and token == "<|eot|>")
    (folder / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
