"""/docs: every path with the fields of its requests, one page of HTML that needs nothing from anywhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ddd;padding:.25em .6em;text-align:left;
vertical-align:top}code,th{font-family:ui-monospace,monospace;font-size:13px}h2{margin-top:2em;font-size:1.05em}"""
REF = "#/components/schemas/"


def page(document: Mapping[str, Any], root_path: str) -> str:
    """
    Args:
        document: the OpenAPI one.
        root_path: under which a proxy shows the server.
    """
    about, schemas = document["info"], document.get("components", {}).get("schemas", {})
    named: dict[str, None] = {}  # schemas that are met on the way, in that order
    parts = [
        f"<h1>{escape(about['title'])} {escape(about['version'])}</h1><p>{escape(about.get('description', ''))} "
        f'For programs: <a href="{escape(root_path)}/openapi.json">openapi.json</a>.</p>'
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p>")
            for content in operation.get("requestBody", {}).get("content", {}).values():
                parts.append(f"<p>The body is {_type(content.get('schema', {}), named)}.</p>")
    done = 0
    while done < len(named):  # its fields may name further ones
        name = list(named)[done]
        parts.append(f'<h2 id="{escape(name)}"><code>{escape(name)}</code></h2>{_table(schemas.get(name, {}), named)}')
        done += 1
    return (
        f"<!doctype html><meta charset=utf-8><title>{escape(about['title'])}</title><style>{STYLE}</style>"
        + "".join(parts)
    )


def _table(schema: Mapping[str, Any], named: dict[str, None]) -> str:
    said = f"<p>{escape(schema.get('description', ''))}</p>" if schema.get("description") else ""
    fields, required = schema.get("properties"), schema.get("required", ())
    if not fields:
        return f"{said}<p>{_type({**schema, 'description': ''}, named)}</p>"
    rows = [
        f"<tr><th>{escape(name)}</th><td>{_type(field, named)}{'' if name in required else _default(field)}</td>"
        f"<td>{escape(field.get('description', ''))}</td></tr>"
        for name, field in fields.items()
    ]
    return f"{said}<table>{''.join(rows)}</table>"


def _default(field: Mapping[str, Any]) -> str:
    value = field.get("default")
    return "" if value is None else f" = <code>{escape(str(value))}</code>"


def _type(schema: Mapping[str, Any], named: dict[str, None]) -> str:
    return " or ".join(dict.fromkeys(_types(schema, named)))


def _types(schema: Mapping[str, Any], named: dict[str, None]) -> Iterator[str]:
    if (ref := schema.get("$ref", "")).startswith(REF):
        name = ref.removeprefix(REF)
        named.setdefault(name)
        yield f'<a href="#{escape(name)}">{escape(name)}</a>'
    for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        if option.get("type") != "null":
            yield from _types(option, named)
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        yield " or ".join(f"<code>{escape(str(value))}</code>" for value in values)
    elif schema.get("type") == "array":
        yield f"list of {_type(schema.get('items', {}), named) or 'anything'}"
    elif "type" in schema:
        yield escape(str(schema["type"]))
