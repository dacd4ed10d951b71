# SPDX-License-Identifier: Apache-2.0
"""Baton under the names that engines import: `mooncake.engine` and `mooncake.store`."""
