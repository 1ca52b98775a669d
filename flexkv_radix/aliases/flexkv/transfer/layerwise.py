"""flexkv.transfer.layerwise"""

from flexkv_radix.layerwise import build_layerwise_eventfd_socket_path

__all__ = ["build_layerwise_eventfd_socket_path"]
