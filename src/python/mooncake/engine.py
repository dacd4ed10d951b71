# SPDX-License-Identifier: Apache-2.0
"""The transfer engine. Peers name it `host:port`, with the port of `get_rpc_port`."""

from mooncake._baton import TransferEngine, TransferNotify, TransferOpcode

TransferEngine.TransferOpcode = TransferOpcode
Read = TransferOpcode.Read
Write = TransferOpcode.Write

__all__ = ["Read", "TransferEngine", "TransferNotify", "TransferOpcode", "Write"]
