"""An engine's start waits for the node's cache, but not for ever."""

from __future__ import annotations

import logging
import time

from flexkv_radix.connectors.base import SharedCache
from flexkv_radix.settings import FlexKVSettings

logger = logging.getLogger(__name__)

_POLL_S = 0.01
_GRACE_S = 30.0  # for what comes after attaching: a transfer worker, and the KV tensors


def await_ready(cache: SharedCache, timeout_s: float, settings: FlexKVSettings) -> bool:
    """Whether lookups may hit, after timeout_s at most.  A cache that comes later is used from then on.

    With FLEXKV_STRICT=1 it waits until the cache serves or is refused, which RuntimeError tells; then it
    was closed.
    """
    if settings.strict:
        _await_strictly(cache, max(timeout_s, settings.attach_timeout_s))
    deadline_s = time.monotonic() + timeout_s
    while not cache.is_ready():
        if time.monotonic() > deadline_s:
            logger.warning(
                "the node's KV cache is not there after %g s; serving without until it is", timeout_s
            )
            return False
        time.sleep(_POLL_S)
    if cache.manager.disabled:
        return False
    logger.info("the node's KV cache is ready")
    return True


def _await_strictly(cache: SharedCache, timeout_s: float) -> None:
    """RuntimeError with the cause, the cache closed, if it is not there.  Attaching has a deadline itself."""
    deadline_s = time.monotonic() + timeout_s + _GRACE_S
    try:
        while not cache.manager.is_ready():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the KV cache is not there after {timeout_s + _GRACE_S:g} s")
            time.sleep(_POLL_S)
    except RuntimeError as error:
        cache.close()
        raise RuntimeError(f"FLEXKV_STRICT=1: {error}") from error
