"""The part of the CUDA driver API that transfers use, with errors raised.

Called through ctypes: libcuda.so.1 comes with the driver and its ABI does not change, so the worker
needs neither torch nor a Python binding of one CUDA version.

Everything goes through the primary context of a device, which is current per thread: call
Device.activate() first on a thread that uses several devices.  Addresses are plain integers.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from flexkv_radix.transfer.protocol import StorageHandle

_SUCCESS = 0
_NOT_READY = 600
_ATTRIBUTE_MAJOR = 75
_ATTRIBUTE_MINOR = 76
_ATTRIBUTE_HOST_POINTERS = 91  # CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_HOST_PORTABLE = 1
_HOST_DEVICE_MAP = 2
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_IPC_LAZY_PEER_ACCESS = 1
_IPC_HANDLE_BYTES = 64


class CudaError(RuntimeError):
    """A driver call failed; code is the driver's name for the error."""

    def __init__(self, what: str, code: str) -> None:
        super().__init__(f"{what}: {code}")
        self.code = code


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", c_char * _IPC_HANDLE_BYTES)]

    @classmethod
    def of(cls, data: bytes) -> _IpcHandle:
        if len(data) != _IPC_HANDLE_BYTES:
            raise ValueError(f"ipc_handle: {_IPC_HANDLE_BYTES} bytes expected, not {len(data)}")
        return cls.from_buffer_copy(data)


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", c_char * 16)]


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"CUDA tensors need NVIDIA's driver: {error}") from error
    code = library.cuInit(0)
    if code != _SUCCESS:
        raise CudaError("cuInit", _error_name(library, code))
    return library


def _error_name(library: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    if library.cuGetErrorName(code, byref(name)) != _SUCCESS or name.value is None:
        return f"error {code}"
    return name.value.decode()


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver API; CudaError unless it succeeds."""
    check(name, getattr(_library(), name)(*arguments))


def check(what: str, code: int) -> None:
    """CudaError unless code is the driver's for success."""
    if code != _SUCCESS:
        raise CudaError(what, _error_name(_library(), code))


def find_function(name: str) -> int:
    """Address of a function of the driver API, for C code to call; 0 if this driver has none."""
    function = getattr(_library(), name, None)
    return 0 if function is None else ctypes.cast(function, c_void_p).value or 0


def _made(name: str, *arguments: Any) -> int:
    """The handle or address that a function stores through its first argument."""
    out = c_void_p()
    call(name, byref(out), *arguments)
    return out.value or 0


class Device:
    """A GPU, with its primary context retained for good."""

    def __init__(self, ordinal: int) -> None:
        number = c_int()
        call("cuDeviceGet", byref(number), ordinal)
        self.ordinal = ordinal
        self._number = number.value
        self.uuid = _uuid(number.value)
        self._context = _made("cuDevicePrimaryCtxRetain", self._number)

    @staticmethod
    @functools.cache
    def at(ordinal: int) -> Device:
        """The device that this process counts as ordinal, as torch does."""
        return Device(ordinal)

    @staticmethod
    def by_uuid(uuid: str) -> Device:
        """ValueError when this process sees no such device."""
        count = c_int()
        call("cuDeviceGetCount", byref(count))
        for ordinal in range(count.value):
            number = c_int()
            call("cuDeviceGet", byref(number), ordinal)
            if _uuid(number.value) == uuid:
                return Device.at(ordinal)
        raise ValueError(f"device_uuid: this process sees no GPU {uuid}")

    def activate(self) -> None:
        """Make this the device of the calling thread."""
        call("cuCtxSetCurrent", c_void_p(self._context))

    @property
    def compute_capability(self) -> int:
        """90 for 9.0."""
        return 10 * self._attribute(_ATTRIBUTE_MAJOR) + self._attribute(_ATTRIBUTE_MINOR)

    def check_host_pointers(self) -> None:
        """Kernels use host addresses as they are; RuntimeError on a system where they cannot."""
        if not self._attribute(_ATTRIBUTE_HOST_POINTERS):
            raise RuntimeError(f"GPU {self.uuid} cannot reach registered host memory by its host address")

    def _attribute(self, attribute: int) -> int:
        value = c_int()
        call("cuDeviceGetAttribute", byref(value), attribute, self._number)
        return value.value


def _uuid(device_number: int) -> str:
    uuid = _Uuid()
    call("cuDeviceGetUuid_v2", byref(uuid), device_number)
    return bytes(uuid).hex()


def driver_cuda_version() -> int:
    """Newest CUDA that the driver supports: 13000 for 13.0."""
    version = c_int()
    call("cuDriverGetVersion", byref(version))
    return version.value


# -- memory


def export_memory(address: int, num_bytes: int) -> StorageHandle:
    """Handle by which another process maps num_bytes at address; RuntimeError if it cannot be shared."""
    base, _ = address_range(address)
    handle = _IpcHandle()
    try:
        call("cuIpcGetMemHandle", byref(handle), c_uint64(base))
    except CudaError as error:
        raise RuntimeError(
            f"kv_caches: this CUDA memory cannot be shared with the transfer worker ({error.code}); "
            "KV tensors need plain cudaMalloc memory: unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF"
        ) from error
    return StorageHandle(num_bytes, bytes(handle), address - base)


def address_range(address: int) -> tuple[int, int]:
    """Start and size in bytes of the allocation that address lies in."""
    base, num_bytes = c_uint64(), c_size_t()
    call("cuMemGetAddressRange_v2", byref(base), byref(num_bytes), c_uint64(address))
    return base.value, num_bytes.value


def open_memory(ipc_handle: bytes) -> int:
    """Map another process's allocation on the active device; its address."""
    return _made("cuIpcOpenMemHandle_v2", _IpcHandle.of(ipc_handle), c_uint(_IPC_LAZY_PEER_ACCESS))


def close_memory(address: int) -> None:
    call("cuIpcCloseMemHandle", c_uint64(address))


def device_alloc(num_bytes: int) -> int:
    return _made("cuMemAlloc_v2", c_size_t(num_bytes))


def device_free(address: int) -> None:
    call("cuMemFree_v2", c_uint64(address))


def device_clear(address: int, num_bytes: int) -> None:
    call("cuMemsetD8_v2", c_uint64(address), 0, c_size_t(num_bytes))


def host_alloc(num_bytes: int) -> int:
    """Pinned host memory that every device reaches by its host address."""
    return _made("cuMemHostAlloc", c_size_t(num_bytes), c_uint(_HOST_PORTABLE | _HOST_DEVICE_MAP))


def host_free(address: int) -> None:
    call("cuMemFreeHost", c_void_p(address))


def host_register(address: int, num_bytes: int) -> None:
    """Pin host memory for every device."""
    flags = _HOST_PORTABLE | _HOST_DEVICE_MAP
    call("cuMemHostRegister_v2", c_void_p(address), c_size_t(num_bytes), c_uint(flags))


def host_unregister(address: int) -> None:
    call("cuMemHostUnregister", c_void_p(address))


def copy_to_device(device_address: int, host_address: int, num_bytes: int) -> None:
    call("cuMemcpyHtoD_v2", c_uint64(device_address), c_void_p(host_address), c_size_t(num_bytes))


def copy_to_device_async(device_address: int, host_address: int, num_bytes: int, stream: int) -> None:
    call(
        "cuMemcpyHtoDAsync_v2",
        c_uint64(device_address),
        c_void_p(host_address),
        c_size_t(num_bytes),
        c_void_p(stream),
    )


# -- streams, events, kernels


def new_stream() -> int:
    """A stream of the active device that waits for no other."""
    return _made("cuStreamCreate", c_uint(_STREAM_NON_BLOCKING))


def stream_wait(stream: int, event: int) -> None:
    """What is put on stream from now on waits for the event's last record."""
    call("cuStreamWaitEvent", c_void_p(stream), c_void_p(event), c_uint(0))


def stream_destroy(stream: int) -> None:
    call("cuStreamDestroy_v2", c_void_p(stream))


def stream_synchronize(stream: int) -> None:
    call("cuStreamSynchronize", c_void_p(stream))


def new_event() -> int:
    return _made("cuEventCreate", c_uint(_EVENT_DISABLE_TIMING))


def open_event(ipc_handle: bytes) -> int:
    """The event that another process records, on the active device."""
    return _made("cuIpcOpenEventHandle", _IpcHandle.of(ipc_handle))


def event_record(event: int, stream: int) -> None:
    call("cuEventRecord", c_void_p(event), c_void_p(stream))


def event_destroy(event: int) -> None:
    call("cuEventDestroy_v2", c_void_p(event))


def is_event_done(event: int) -> bool:
    """Whether what was recorded is over; CudaError when it failed."""
    code = _library().cuEventQuery(c_void_p(event))
    if code != _NOT_READY:
        check("transfer", code)
    return bool(code == _SUCCESS)


def load_module(code: bytes) -> int:
    return _made("cuModuleLoadData", code)


def get_function(module: int, name: str) -> int:
    return _made("cuModuleGetFunction", c_void_p(module), name.encode())


def launch(
    function: int, num_blocks: int, num_threads: int, stream: int, arguments: ctypes.Structure
) -> None:
    """Launch a kernel of 1-D blocks whose parameters are the fields of arguments, in order."""
    base = ctypes.addressof(arguments)
    fields = [name for name, *_ in arguments._fields_]
    pointers = (c_void_p * len(fields))(*(base + getattr(type(arguments), name).offset for name in fields))
    grid, block = (c_uint(num_blocks), c_uint(1), c_uint(1)), (c_uint(num_threads), c_uint(1), c_uint(1))
    call("cuLaunchKernel", c_void_p(function), *grid, *block, c_uint(0), c_void_p(stream), pointers, None)
