"""Write the JSON schema of every document of the format to docs/schemas; --check only compares.

docs/format.md says what the documents mean; these files say exactly what they hold.
"""

import argparse
import json
import sys
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from trainer_sidecar.contract.checkpoint import Index, ManifestFile, Part, Witness
from trainer_sidecar.contract.journal import Entry, Latest

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schemas"
DOCUMENTS: dict[str, type[BaseModel]] = {
    "part": Part,
    "index": Index,
    "manifest": ManifestFile,
    "witness": Witness,
    "latest": Latest,
}


def schemas() -> dict[str, str]:
    """File name -> text."""
    entry: TypeAdapter[Entry] = TypeAdapter(Entry)
    made = {name: model.model_json_schema(by_alias=True) for name, model in DOCUMENTS.items()}
    made["journal-entry"] = entry.json_schema(by_alias=True)
    return {
        f"{name}.schema.json": json.dumps(schema, indent=1) + "\n" for name, schema in sorted(made.items())
    }


def differing() -> list[str]:
    """Names of schema files that are missing, differ from the models, or belong to no document."""
    wanted = schemas()
    known = {p.name: p.read_text() for p in FOLDER.glob("*.json")}
    return sorted(name for name in wanted.keys() | known.keys() if wanted.get(name) != known.get(name))


def main() -> int:
    """Exit status: 0, or 1 when --check finds a difference."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true")
    if arguments.parse_args().check:
        stale = differing()
        print(
            "\n".join(f"docs/schemas/{name} is stale: run hack/format_schemas.py" for name in stale)
            or "up to date"
        )
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for name, text in schemas().items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
