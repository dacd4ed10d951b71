# SPDX-License-Identifier: Apache-2.0
"""The object store, over one or several `baton store serve`."""

import ctypes
import enum

from mooncake import _baton

__all__ = ["BufferHandle", "MooncakeDistributedStore", "ObjectDataType", "ReplicaDescriptor", "ReplicateConfig", "SoftPinAction"]



class ObjectDataType(enum.Enum):
    """What a value is, as far as its owner says."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class SoftPinAction(enum.Enum):
    """What a put does to the pin of its key."""

    PRESERVE = 0


class ReplicateConfig:
    """Where and how often a value is to be kept. Taken and not acted on: a key has one place, which its hash chooses."""

    def __init__(self):
        self.replica_num = 1
        self.nof_replica_num = 0
        self.dfs_replica_num = 0
        self.with_hard_pin = False
        self.soft_pin_action = SoftPinAction.PRESERVE
        self.soft_pin_ttl_ms = None
        self.preferred_segment = ""
        self.preferred_segments = []
        self.preferred_nof_segments = []
        self.prefer_alloc_in_same_node = False
        self.data_type = ObjectDataType.UNKNOWN
        self.group_ids = None


class ReplicaDescriptor:
    """Where a value is kept: always in a server's memory."""

    status = "COMPLETE"

    def is_memory_replica(self):
        return True

    def is_disk_replica(self):
        return False

    def is_local_disk_replica(self):
        return False


class BufferHandle(bytearray):
    """A value that was got, with memory of its own: all that takes a buffer takes it."""

    def ptr(self):
        """The address, for as long as the handle lives; 0 of an empty value."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self)) if self else 0

    def size(self):
        return len(self)


def _bytes(value):
    return value if isinstance(value, (bytes, bytearray)) else bytes(value)


class MooncakeDistributedStore(_baton.Store):
    """Values by key. Failures are numbers below 0, and a line in the log of `mooncake.store`."""

    def __init__(self):
        self._hostname = ""

    def setup(
        self,
        local_hostname,
        metadata_server="",
        global_segment_size=0,
        local_buffer_size=0,
        protocol="tcp",
        rdma_devices="",
        master_server_addr="",
        *_,
        tenant_id="default",
        **_more,
    ):
        """Opens the stores at `master_server_addr`: `host:port`, several with commas. 0, or below 0.

        Memory is the stores' own, so the sizes mean nothing here; values go over sockets, whatever the protocol.
        """
        if isinstance(local_hostname, dict):
            config = local_hostname
            return self.setup(
                config.get("local_hostname", ""),
                master_server_addr=config.get("master_server_addr", ""),
                tenant_id=config.get("tenant_id", "default"),
            )
        self._hostname = local_hostname
        return self.open(master_server_addr, tenant_id or "default")

    def batch_put_from_multi_buffers(self, keys, all_buffer_ptrs, all_sizes, config=None):
        """Puts values from registered memory, several pieces each. 0, or below 0, for each key."""
        return self.put_spans(keys, all_buffer_ptrs, all_sizes)

    def batch_get_into_multi_buffers(self, keys, all_buffer_ptrs, all_sizes, prefer_alloc_in_same_node=False):
        """Gets values into registered memory, several pieces each. Bytes, or below 0, for each key; a value that does
        not fill its pieces is a miss."""
        return self.get_spans(keys, all_buffer_ptrs, all_sizes)

    def batch_put_from(self, keys, buffer_ptrs, sizes, config=None):
        return self.put_spans(keys, [[pointer] for pointer in buffer_ptrs], [[size] for size in sizes])

    def batch_get_into(self, keys, buffer_ptrs, sizes):
        """Gets values into one piece each, which may be longer."""
        return self.get_into_larger(keys, [[pointer] for pointer in buffer_ptrs], [[size] for size in sizes])

    def batch_remove(self, keys, force=False):
        """Removes values; 0, or below 0 where there is none. A read under way keeps its bytes, so nothing need be forced."""
        return self.remove_each(keys)

    def remove_all(self, force=False):
        """Removes everything; how much that was, or below 0."""
        return self.clear()

    def get_hostname(self):
        return self._hostname

    def is_exist(self, key):
        return self.batch_is_exist([key])[0]

    def put(self, key, value, config=None):
        return self.batch_put([key], [_bytes(value)])[0]

    def put_parts(self, key, *parts, config=None):
        return self.batch_put([key], [b"".join(_bytes(part) for part in parts)])[0]

    def put_batch(self, keys, values, config=None):
        """0, or the first failure."""
        return min(self.batch_put(keys, [_bytes(value) for value in values]), default=0)

    def put_from(self, key, buffer_ptr, size, config=None):
        return self.batch_put_from([key], [buffer_ptr], [size])[0]

    def get(self, key):
        """The value; empty where there is none."""
        return self.get_batch([key])[0]

    def get_batch(self, keys):
        return [b"" if value is None else value for value in self.get_each(keys)]

    def get_buffer(self, key):
        """The value as a `BufferHandle`; `None` where there is none."""
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys):
        return [None if value is None else BufferHandle(value) for value in self.get_each(keys)]

    def get_into(self, key, buffer_ptr, size):
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def get_size(self, key):
        return self.batch_get_size([key])[0]

    def remove(self, key, force=False):
        return self.batch_remove([key])[0]

    def get_replica_desc(self, key):
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys):
        """Where values are, for keys that have one."""
        return {key: [ReplicaDescriptor()] for key, found in zip(keys, self.batch_is_exist(keys)) if found == 1}
