"""Chat templates, which are programs of others."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from effasr.untrusted import chat_template, template_worker
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


def test_hard_limits_of_the_system_are_kept(monkeypatch):
    """Only the administrator may raise one, such as that of a login node."""
    requested = []
    hard = {resource.RLIMIT_CPU: 600, resource.RLIMIT_AS: 2**34}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (hard[kind], hard[kind]))
    monkeypatch.setattr(
        resource, "setrlimit", lambda kind, limits: requested.append((kind, *limits))
    )
    template_worker._limit_time(10**6)
    template_worker._limit_memory(2**60)
    assert requested == [(resource.RLIMIT_CPU, 600, 600), (resource.RLIMIT_AS, 2**34, 2**34)]
    template_worker._limit_time(5)
    assert requested[-1][1] < 600
    assert requested[-1][2] == 600


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
        ("{{ 'x' * 10 ** 9 }}", "more than 512 MiB of memory"),
        ("{{ '%999999999d' % 1 }}", "more than 512 MiB of memory"),
        ("{{ 'x' * 5000000 }}", "writes more than 4194304 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deep"),
        ("{{ " + "(" * 5000, "nested too deep"),
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


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", [LOOPS, "{{ 9 ** (9 ** 9) }}"], ids=["loops", "one operation"])
def test_a_template_that_does_not_end_is_ended(template, monkeypatch):
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 1)
    chat_template._renderer.end()
    with pytest.raises(TemplateError, match="it takes more than 1 s of processor time"):
        render_template(template, {})
    assert render_template("{{ 1 + 1 }}", {}) == "2"
    chat_template._renderer.end()


def test_a_fork_has_a_renderer_of_its_own():
    assert render_template("a", {}) == "a"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if render_template("{{ 2 * 3 }}", {}) == "6" else 2
            chat_template._renderer.end()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert render_template("b", {}) == "b"


_KILLED = """
import os
from effasr.untrusted.chat_template import _renderer, render_template

render_template("a", {})
print(_renderer._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.timeout(60)
def test_the_process_ends_with_the_one_that_asked():
    root = Path(chat_template.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _KILLED], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -9
    status = Path(f"/proc/{done.stdout.strip()}/stat")
    while status.exists() and " Z " not in status.read_text():
        time.sleep(0.05)
