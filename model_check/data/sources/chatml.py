"""ChatML, the chat template for a tokenizer that comes without one."""

from model_check.data.sources.chat import ChatTemplate

CHATML_NAME = "chatml"
"""The value of data.chat_template that names it."""

# In a tokenizer without these marks as special tokens they are plain text, which a message could
# spell as well: then it would forge a turn.
CHATML = ChatTemplate(
    """\
{%- for message in messages -%}
{%- for mark in ['<|im_start|>', '<|im_end|>'] if mark in message['role'] + message['content'] -%}
{{- raise_exception('a message spells ' + mark) -}}
{%- endfor -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""",
    begin_token=None,
    end_token=None,
)
