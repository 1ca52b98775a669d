"""KVTPClient: how a rank hands its KV tensors to the transfer worker of its engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flexkv_radix.layout import BlockLayout, KVCacheLayout
from flexkv_radix.transfer.protocol import RankPlace, RegisterRank
from flexkv_radix.transfer.registration import RankRefused, Registration, register_rank
from radixshmem import ComponentType

if TYPE_CHECKING:
    import torch

    from flexkv_radix.rank_parts import Group

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 120.0  # the worker maps the tensors one rank after the other
_RECHECK_S = 0.5
_POLL_S = 0.02
_AGAIN_POLL_S = 0.1  # a worker that is started again, or never: no need to look as often
_REFUSED_PAUSE_S = 2.0
_SAY_WAITING_S = 30.0
_CLOSE_TIMEOUT_S = 7.0  # longer than a registration takes to end


class KVTPClient:
    """One rank of an engine.

    gpu_register_port and dp_client_id are the KVManager's, and so has FLEXKV_INSTANCE_ID to be.  Within a
    pipeline stage the order of (intra_client_id, device_id) decides which share of a slot is this rank's,
    so it has to be the same in all engines that share a node's cache.

    A rank whose process may be another engine's is not taken, but goes on trying (transfer/claims.py).
    """

    def __init__(
        self,
        gpu_register_port: str,
        dp_client_id: int,
        device_id: int,
        pp_rank: int = 0,
        intra_client_id: int = 0,
    ) -> None:
        from flexkv_radix.settings import load_settings, rank_endpoint  # has pydantic

        self._endpoint = rank_endpoint(load_settings(), gpu_register_port, dp_client_id)
        self._place = RankPlace(dp_client_id, pp_rank, (intra_client_id << 16) + device_id)
        self._stop = threading.Event()
        self._registered = threading.Event()
        self._thread: threading.Thread | None = None
        self._tensors: Sequence[torch.Tensor] = ()  # what was shared lives as long as they do
        self._step: torch.cuda.Event | None = None  # what stores wait for
        self._was_registered = False
        self.error = ""  # why the worker has not taken the tensors, if it said so

    def register_to_server(
        self,
        kv_caches: Any,
        kv_layout: BlockLayout | Sequence[BlockLayout],
        indexer_buffers: Sequence[torch.Tensor] | None = None,
        indexer_layout: KVCacheLayout | None = None,
        swa_kv_caches: Any = None,
        swa_kv_layout: BlockLayout | Sequence[BlockLayout] | None = None,
    ) -> None:
        """Share this rank's KV tensors; returns at once, the worker may come up at any time until close().

        kv_caches: the tensors that kv_layout describes, or for several layouts (groups of layers with
        their own shapes) a list of lists.  indexer_buffers: one more group, whose layer i travels with
        layer i of the first.  swa_*: tensors of the sliding-window component.

        CPU tensors are moved to shared memory in place.  ValueError if tensors and layout do not fit.
        The tensors must not be freed before close().
        """
        from flexkv_radix.rank_parts import groups_of, rank_parts  # torch, which a scheduler may lack

        groups = {ComponentType.FULL: groups_of("kv_caches", kv_caches, kv_layout)}
        if indexer_buffers:
            if indexer_layout is None:
                raise ValueError("indexer_layout: missing, but indexer_buffers are given")
            groups[ComponentType.FULL] += groups_of("indexer_buffers", indexer_buffers, indexer_layout)
        if swa_kv_caches is not None:
            if swa_kv_layout is None:
                raise ValueError("swa_kv_layout: missing, but swa_kv_caches are given")
            groups[ComponentType.SWA] = groups_of("swa_kv_caches", swa_kv_caches, swa_kv_layout)
        self._share(groups, rank_parts)

    def _share(self, groups: dict[ComponentType, list[Group]], rank_parts: Any) -> None:
        from flexkv_radix.transfer.tensors import share_tensors

        if self._thread is not None:
            raise RuntimeError(
                "this rank has registered its KV tensors before; close() and make a new KVTPClient"
            )
        self._tensors = [tensor for group in groups.values() for tensors, _ in group for tensor in tensors]
        shared = share_tensors(self._tensors)
        parts = rank_parts(groups, shared.views)
        step = self._make_step_event() if shared.device_uuid else b""
        rank = RegisterRank(self._place, shared.storages, parts, shared.device_uuid, step)
        self._thread = threading.Thread(
            target=self._keep_registered, args=(rank, shared.fds), name="flexkv-register", daemon=True
        )
        self._thread.start()

    def _make_step_event(self) -> bytes:
        import torch

        with torch.cuda.device(self._tensors[0].device):
            self._step = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            return bytes(self._step.ipc_handle())  # type: ignore[no-untyped-call]

    def record_step(self) -> None:
        """Stores launched after this start behind what the current CUDA stream holds now.

        Needed only where a store is launched before the forward that writes its blocks is known to be
        over.  Does nothing for CPU tensors.
        """
        if self._step is not None:
            import torch

            self._step.record(torch.cuda.current_stream(self._tensors[0].device))

    def wait_registered(self, timeout_s: float) -> bool:
        """Whether the worker has taken the tensors, within timeout_s.  RuntimeError if it refused them.

        At once if that is for good, else at the end of timeout_s: the rank goes on trying.
        """
        self._registered.wait(timeout_s)
        if self.error:
            raise RuntimeError(self.error)
        return self._registered.is_set()

    def close(self) -> None:
        """Withdraw the tensors; they may be freed afterwards.  A second call does nothing.

        Waits some seconds until the worker has unmapped them.  If it has not by then (it is stopped, or a
        transfer hangs), a warning says so: until it ends it may still write to them.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():  # it waits for the answer to a registration
                self._say_mapped()
        self._tensors = ()

    def _say_mapped(self) -> None:
        logger.warning("%s: the transfer worker has not let go of the KV tensors", self._place)

    def _keep_registered(self, rank: RegisterRank, fds: Sequence[int]) -> None:
        """Register, and again whenever the worker was replaced."""
        while not self._stop.is_set():
            registration = self._register(rank, fds)
            if registration is None:
                return
            self._registered.set()
            while registration.is_alive() and not self._stop.wait(_RECHECK_S):
                pass
            self._registered.clear()
            if not registration.close():
                self._say_mapped()

    def _register(self, rank: RegisterRank, fds: Sequence[int]) -> Registration | None:
        """Register as soon as a worker listens, however long it takes.

        None after close(), or where the worker never was there before and refuses for good.  Once it was,
        another may come.
        """
        waiting = _Waiting(rank.place, is_again=self._was_registered)
        while not self._stop.is_set():
            try:
                registration = register_rank(self._endpoint, rank, fds, _ANSWER_TIMEOUT_S, wait=False)
            except OSError as error:  # nobody listens, or the worker died meanwhile
                waiting.say(str(error))
                pause_s = _AGAIN_POLL_S if self._was_registered or waiting.is_long else _POLL_S
            except RuntimeError as error:  # the worker's refusal; or another user listens there
                self.error = str(error)
                may_pass = isinstance(error, RankRefused) and error.may_pass
                if not may_pass and not self._was_registered:
                    self._give_up(rank)
                    return None
                waiting.say_refused(self.error)
                pause_s = _REFUSED_PAUSE_S
            else:
                self._was_registered, self.error = True, ""
                return registration
            self._stop.wait(pause_s)
        return None

    def _give_up(self, rank: RegisterRank) -> None:
        self._registered.set()
        logger.warning(
            "%s: KV tensors are not registered, the engine runs without its cache: %s", rank.place, self.error
        )


class _Waiting:
    """What is said while a rank is not registered: a refusal once, what it waits for every 30 s.

    A rank that was registered says refusals only: its KVManager has said that the worker is gone.
    """

    def __init__(self, place: RankPlace, *, is_again: bool) -> None:
        self._place = place
        self._is_again = is_again
        self._since_s = self._said_s = time.monotonic()
        self._refusal = ""

    @property
    def is_long(self) -> bool:
        return time.monotonic() > self._since_s + _SAY_WAITING_S

    def say(self, what: str) -> None:
        if not self._is_again and time.monotonic() > self._said_s + _SAY_WAITING_S:
            self._said_s = time.monotonic()
            waited_s = self._said_s - self._since_s
            logger.warning("%s: KV tensors are not registered after %.0f s: %s", self._place, waited_s, what)

    def say_refused(self, why: str) -> None:
        if why != self._refusal:
            self._refusal, self._said_s = why, time.monotonic()
            again = " again" if self._is_again else ""
            logger.warning("%s: KV tensors are not registered%s: %s", self._place, again, why)
        self.say(why)
