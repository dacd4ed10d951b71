# SPDX-License-Identifier: Apache-2.0
"""The transfer engine, with Mooncake's signatures. Peers name it `host:port`, with the port of `get_rpc_port`.

Calls return 0, a number or an address; below 0 (or 0 for numbers and addresses) they have failed, and a line in the log
`mooncake.engine` says why. Devices, locations and hints of transports are taken and not acted on: sockets have none to choose.
"""

import enum

from mooncake import _baton

__all__ = ["Read", "TransferEngine", "TransferNotify", "TransferOpcode", "Write"]

TransferNotify = _baton.TransferNotify


class TransferOpcode(enum.Enum):
    """Which way bytes go: from the peer, or to it."""

    Read = 0
    Write = 1


Read = TransferOpcode.Read
Write = TransferOpcode.Write


class TransferEngine(_baton.Engine):
    """Moves bytes between registered memory of this process and of others."""

    TransferOpcode = TransferOpcode

    def initialize(self, local_hostname, metadata_server, protocol, device_name=""):
        """Starts the engine at an address or name of this machine."""
        return self.start(local_hostname, metadata_server, protocol)

    def register_memory(self, buffer_addr, capacity, location="*"):
        """Registers memory, which stays mapped until it has been unregistered."""
        return self.register([buffer_addr], [capacity])

    def batch_register_memory(self, buffer_addresses, capacities, location="*"):
        """Registers several ranges, all or none."""
        return self.register(buffer_addresses, capacities)

    def unregister_memory(self, buffer_addr):
        """Takes memory off; after 0 nobody touches it any more."""
        return self.unregister([buffer_addr])

    def batch_unregister_memory(self, buffer_addresses):
        return self.unregister(buffer_addresses)

    def free_managed_buffer(self, buffer_addr, length):
        return self.unregister([buffer_addr])

    def transfer_sync_write(self, target_hostname, buffer, peer_buffer_address, length, transport_hint=""):
        """Writes to a peer, and waits until all is there."""
        return self.move_pieces(target_hostname, True, ([buffer], [peer_buffer_address], [length]))

    def transfer_sync_read(self, target_hostname, buffer, peer_buffer_address, length, transport_hint=""):
        """Reads from a peer, and waits until all is here."""
        return self.move_pieces(target_hostname, False, ([buffer], [peer_buffer_address], [length]))

    def batch_transfer_sync_write(self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint=""):
        return self.move_pieces(target_hostname, True, (buffers, peer_buffer_addresses, lengths))

    def batch_transfer_sync_read(self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint=""):
        return self.move_pieces(target_hostname, False, (buffers, peer_buffer_addresses, lengths))

    def transfer_sync(self, target_hostname, buffer, peer_buffer_address, length, opcode, notify=None, transport_hint=""):
        lists = ([buffer], [peer_buffer_address], [length])
        return self._move(target_hostname, opcode, notify, lists)

    def batch_transfer_sync(
        self, target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify=None, transport_hint=""
    ):
        return self._move(target_hostname, opcode, notify, (buffers, peer_buffer_addresses, lengths))

    def _move(self, target, opcode, notify, lists):
        """Either way; a notice is left when all is in place."""
        writes = opcode is TransferOpcode.Write
        if notify is None:
            return self.move_pieces(target, writes, lists)
        return self.move_and_tell(target, (writes, notify), lists)

    def batch_transfer_async_write(self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint=""):
        """Begins to write; a number for `get_batch_transfer_status`, or 0."""
        return self.begin(target_hostname, True, (buffers, peer_buffer_addresses, lengths))

    def batch_transfer_async_read(self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint=""):
        return self.begin(target_hostname, False, (buffers, peer_buffer_addresses, lengths))

    def batch_transfer_async(
        self, target_hostname, buffers, peer_buffer_addresses, lengths, opcode, transport_hint=""
    ):
        lists = (buffers, peer_buffer_addresses, lengths)
        return self.begin(target_hostname, opcode is TransferOpcode.Write, lists)

    def get_batch_transfer_status(self, batch_ids):
        """Waits for the end of what was begun. Each number can be asked about once."""
        return self.wait(batch_ids)

    def transfer_submit_write(self, target_hostname, buffer, peer_buffer_address, length, transport_hint=""):
        """Begins to write; a number for `transfer_check_status`, or below 0."""
        return self.begin(target_hostname, True, ([buffer], [peer_buffer_address], [length])) or -1

    def transfer_check_status(self, batch_id):
        """1 when all is in place, 0 while it is under way."""
        return self.check(batch_id)

    def write_bytes_to_buffer(self, dest_address, src_ptr, length=None):
        return self.fill(dest_address, bytes(src_ptr)[:length])
