"""Which requests may share KV: what decides a block's bytes beside the tokens, as a namespace."""

from __future__ import annotations

from collections.abc import Iterable


def request_namespace(
    *, lora: str | None = None, salt: str | None = None, extra: str | None = None, media: Iterable[str] = ()
) -> list[str] | None:
    """Namespace of a request, None for the common one.

    lora: name of its adapter.  salt: its tenant's.  extra: another key of the engine's, for whatever it
    keeps apart.  media: one string per image, sound..., in prompt order; tokens do not tell them apart.
    Parts are typed and escaped, so that no value of one kind can imitate another.
    """
    kinds = [("lora", lora), ("salt", salt), ("extra", extra), *(("media", item) for item in media)]
    parts = [f"{kind}={_escaped(value)}" for kind, value in kinds if value]
    return parts or None


def _escaped(value: str) -> str:
    """NUL joins the parts of a namespace, so none may be inside one."""
    return value.replace("\\", "\\\\").replace("\0", "\\0")
