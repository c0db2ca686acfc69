"""The training library's reference, from the docstrings and signatures of what its packages export.

Read by griffe, which imports nothing: the page needs neither torch nor the frameworks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "trainer_sidecar.train": "In your script. Guides: [a script](../add-it-to-your-script.md), [data](../data.md), "
    "[folders of other frameworks](../own-folder.md).",
    "trainer_sidecar.dcp": "For scripts that call torch.distributed.checkpoint themselves. Guide: "
    "[migrate](../migrate.md).",
    "trainer_sidecar.integrations.transformers": "Guide: [Hugging Face](../transformers.md).",
    "trainer_sidecar.integrations.accelerate": "Guide: [Accelerate](../transformers.md#accelerate).",
    "trainer_sidecar.integrations.lightning": "Guide: [Lightning](../lightning.md).",
    "trainer_sidecar.integrations.torchtitan": "Guide: [torchtitan](../torchtitan.md).",
}
INTRODUCTION = """# The training library

What scripts import, with its arguments, results and errors. Made from the docstrings by `make generate`.
"""


def page() -> str:
    """Markdown, one section for each package."""
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    parts = [INTRODUCTION]
    for name, guide in PACKAGES.items():
        package = loader.load(name)
        assert isinstance(package, griffe.Module)
        loader.resolve_aliases(external=False)
        parts += [f"## {name}\n", f"{_text(package)}\n", f"{guide}\n"]
        for member in _exported(package):
            parts += _documented(member)
    return "\n".join(parts)


def _exported(package: griffe.Module) -> Iterator[griffe.Object]:
    """What `__all__` names, or else what the module itself defines without an underscore."""
    names = [str(name) for name in package.exports or ()] or [
        name for name, member in package.members.items() if not name.startswith("_") and not member.is_alias
    ]
    for name in names:
        member = package.members.get(name)
        if member is None:
            continue
        found = member.final_target if isinstance(member, griffe.Alias) else member
        if found.docstring is not None and (found.is_class or found.is_function):
            yield found


def _documented(member: griffe.Object) -> Iterator[str]:
    kind = "class " if isinstance(member, griffe.Class) else ""
    constructor = member.members.get("__init__") if isinstance(member, griffe.Class) else member
    arguments = _arguments(constructor) if isinstance(constructor, griffe.Function) else ""
    yield f"### {member.name}\n"
    yield f"```python\n{kind}{member.name}{arguments}\n```\n"
    yield f"{_text(member)}\n"
    if isinstance(member, griffe.Class):
        yield from _members(member)


def _members(cls: griffe.Class) -> Iterator[str]:
    told = [m for name, m in cls.members.items() if not name.startswith("_") and m.docstring is not None]
    values = [m for m in told if isinstance(m, griffe.Attribute)]
    if values:
        yield "| attribute | |\n| --- | --- |"
        yield "\n".join(f"| `{m.name}` | {_cell(m)} |" for m in values) + "\n"
    for method in told:
        if isinstance(method, griffe.Function):
            yield f"#### {cls.name}.{method.name}\n"
            yield f"```python\n{method.name}{_arguments(method)}\n```\n"
            yield f"{_text(method)}\n"


def _arguments(function: griffe.Function) -> str:
    """The signature, on one line or with an argument on each."""
    shown: list[str] = []
    keywords = False
    for parameter in function.parameters:
        if parameter.name in ("self", "cls") or parameter.name.startswith("_"):
            continue
        kind = parameter.kind or griffe.ParameterKind.positional_or_keyword
        star = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(
            kind, ""
        )
        if kind is griffe.ParameterKind.keyword_only and not keywords:
            keywords = True
            shown.append("*")
        keywords = keywords or star == "*"
        typed = f": {parameter.annotation}" if parameter.annotation is not None else ""
        default = f" = {parameter.default}" if parameter.default is not None and not star else ""
        shown.append(f"{star}{parameter.name}{typed}{default}")
    result = f" -> {function.returns}" if function.returns is not None and function.name != "__init__" else ""
    line = f"({', '.join(shown)}){result}"
    if len(line) <= 90:
        return line
    return "(\n" + "".join(f"    {one},\n" for one in shown) + f"){result}"


def _text(member: griffe.Object) -> str:
    return member.docstring.value.strip() if member.docstring is not None else ""


def _cell(member: griffe.Object) -> str:
    return " ".join(_text(member).split()).replace("|", "\\|")
