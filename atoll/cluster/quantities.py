"""Kubernetes quantities of memory as whole bytes, exact.

In: text such as 40Gi. Out: bytes. Separate, because a claim, a model and a report must agree to the byte.
"""

from atoll.cluster.errors import MalformedValue

_FACTORS = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


def parse_bytes(quantity: str) -> int:
    """Return the bytes of `quantity`: digits and a suffix of k, M, G, T, Ki, Mi, Gi, Ti. Raises MalformedValue."""
    digits = quantity.rstrip("kKMGTi")
    suffix = quantity[len(digits) :]
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 18 or suffix not in _FACTORS:
        raise MalformedValue("quantity", quantity, "digits with a suffix such as Gi")
    return int(digits) * _FACTORS[suffix]
