"""Renders chat templates of models in Jinja's sandbox, as transformers does.

The sandbox keeps a template from files and from other objects; it bounds neither time nor memory.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_CHARACTERS = 4 << 20
"""Limit of one rendered text."""

_TODAY = datetime(2024, 7, 26)
"""What a template is told of the date: what Llama's templates take where they are told none. Rows
that depended on the day of tokenization would be other ones when a run continues."""


class TemplateError(ValueError):
    """A chat template cannot be rendered, or refuses a conversation."""


class _GenerationBlock(Extension):
    """``{% generation %}``, which marks the turns of the assistant: its content is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(content, lineno=line)


def render_template(template: str, variables: Mapping[str, Any]) -> str:
    """Render a template in Jinja's sandbox; raises `TemplateError`.

    The template has what transformers provides: ``raise_exception``, ``tojson``, ``strftime_now``,
    ``generation`` blocks, ``break`` and ``continue``. The date is always 26 July 2024, so that the
    text of a conversation does not depend on the day.
    """
    try:
        text = _compiled(template).render(variables)
    except Exception as error:  # A template raises whatever its expressions do.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TemplateError(f"the chat template cannot be rendered: {reason}") from error
    if len(text) > MOST_CHARACTERS:
        raise TemplateError(
            f"the chat template cannot be rendered: it writes more than {MOST_CHARACTERS} "
            "characters"
        )
    return text


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment.from_string(template)


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(value: Any, **options: Any) -> str:
    """Jinja's own filter would escape for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **options})
