"""An engine's start waits for the node's cache, but not for ever."""

from __future__ import annotations

import logging
import time

from flexkv_radix.connectors.base import SharedCache

logger = logging.getLogger(__name__)

_POLL_S = 0.01


def await_ready(cache: SharedCache, timeout_s: float) -> bool:
    """Whether lookups may hit, after timeout_s at most.  A cache that comes later is used from then on."""
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
