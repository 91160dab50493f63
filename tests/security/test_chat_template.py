"""Chat templates, which are programs of others."""

import pytest

from effasr.untrusted.chat_template import TemplateError, render_template

TURNS = [{"role": "user", "content": "ü <b>\ud800\n"}, {"role": "assistant", "content": "yes"}]
VARIABLES = {"messages": TURNS, "tools": None, "add_generation_prompt": True, "bos_token": "<s>"}

FEATURES = """\
{{- bos_token }}
{%- set found = namespace(first=true) %}
{%- macro shown(turn) %}[{{ turn.role | upper }}: {{ turn['content'] | trim }}]{% endmacro %}
{% for message in messages %}
    {%- if not found.first %}{{ ", " }}{% endif %}
    {%- set found.first = false %}
    {%- if tools is not none %}{% continue %}{% endif %}
    {%- generation %}{{ shown(message) }}{% endgeneration %}
    {%- if loop.last %}{% break %}{% endif %}
{% endfor %}

{{ messages | tojson(indent=1) }}
{{ dict(a=1) | tojson }} {{ messages[::-1][0].content }} {{ "x" ~ range(3) | list }}
{% if strftime_now is defined %}{{ messages | length }}{% endif %}
{% if add_generation_prompt %}<assistant>
{% endif %}"""


def test_texts_are_those_of_transformers():
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    (expected,), _ = utils.render_jinja_template(
        conversations=[TURNS], chat_template=FEATURES, add_generation_prompt=True, bos_token="<s>"
    )
    assert "[ASSISTANT: yes]" in expected
    assert render_template(FEATURES, VARIABLES) == expected


def test_a_text_does_not_depend_on_the_day():
    assert render_template("{{ strftime_now('%d %b %Y') }}", {}) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles\nmust alternate') }}", "roles must alternate"),
        ("{% for %}", "Expected"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ nothing.here }}", "'nothing' is undefined"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ 'x' * 5000000 }}", "writes more than 4194304 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ " + "(" * 5000, "maximum recursion depth"),
    ],
)
def test_what_a_template_may_not_do(template, reason):
    with pytest.raises(
        TemplateError, match=f"the chat template cannot be rendered: .*{reason}"
    ) as error:
        render_template(template, VARIABLES)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
    # The next one is not harmed.
    assert render_template("{{ bos_token }}", VARIABLES) == "<s>"
