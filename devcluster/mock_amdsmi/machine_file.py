"""AMD machines of known shape as files of the mock library.

The methods of MachineFile change facts by key. Serial numbers follow from seed and position.
"""

import uuid as uuids
from typing import Final

from devcluster.mock_nvml.machine_file import NAMESPACE, MachineFile, bus_id
from topology.links import direct_links

NOT_FOUND: Final = 31
_GFX: Final = {"9.0": "0x90a", "9.4": "0x942"}


class AmdMachineFile(MachineFile):
    """Facts of one machine. `order[i]` is the position in the profile of the card with index i in the library."""

    lost_code = NOT_FOUND

    def uuid_of(self, position: int) -> str:
        """Name in ROCR_VISIBLE_DEVICES of the card at a position of the profile."""
        return f"GPU-{self._serial(position)}"

    def _serial(self, position: int) -> str:
        return f"{uuids.uuid5(NAMESPACE, f'{self.seed}/serial/{position}').int % 16**16:016x}"

    def _gpu(self, position: int) -> dict[str, str]:
        profile, numa = self.profile, self.profile.machine.numa[position]
        return {
            "name": profile.product_name,
            "serial": f"0x{self._serial(position).upper()}",
            "uuid": str(uuids.uuid5(NAMESPACE, f"{self.seed}/{position}")),
            "gfx": _GFX[profile.compute_capability],
            "memory_mib": str(profile.memory_bytes >> 20),
            "bus": bus_id(position)[4:].lower(),
            "numa": str(numa if numa is not None else -1),
            "ecc_corrected": "0",
            "ecc_uncorrected": "0",
        }

    def _links(self, position: int) -> list[str]:  # noqa: ARG002 - links are told by pairs alone
        return []

    def _pairs(self, index: int, position: int) -> dict[str, str]:
        row = self.profile.machine.links[position]
        counts = {other: direct_links(row[peer]) for other, peer in enumerate(self.order) if other != index}
        return {f"pair.{index}.{other}.xgmi": str(count) for other, count in counts.items() if count}
