"""The one base class of all documents, so that field naming and strictness are decided in one place.

JSON uses camelCase, Python snake_case. Documents that we write are closed (`extra="forbid"` catches our own typos);
documents that are read from another process or from the store ignore fields they do not know, so that a newer
minor version can add some: a change of meaning raises `schema` instead.
"""

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Document(BaseModel):
    """Immutable JSON document in camelCase."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="ignore",
        allow_inf_nan=True,
        ser_json_inf_nan="strings",
        protected_namespaces=(),
    )

    def to_json(self) -> str:
        """Canonical JSON text: camelCase names, fields in declared order, None left out, no spaces."""
        return self.model_dump_json(by_alias=True, exclude_none=True)

    def to_bytes(self) -> bytes:
        """`to_json` as UTF-8: the exact bytes that are hashed and stored."""
        return self.to_json().encode()
