"""Kubernetes quantities as whole units, exact.

Text such as 40Gi becomes bytes of device memory; what pods request becomes thousandths of a CPU, and whole units of
anything else. A claim, a model and a report must agree to the byte.
"""

from decimal import ROUND_CEILING, Decimal, InvalidOperation, Overflow
from functools import lru_cache

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


_RATIOS = {
    "n": (1, 10**9), "u": (1, 10**6), "m": (1, 10**3), "": (1, 1),
    "k": (10**3, 1), "M": (10**6, 1), "G": (10**9, 1), "T": (10**12, 1), "P": (10**15, 1), "E": (10**18, 1),
    "Ki": (2**10, 1), "Mi": (2**20, 1), "Gi": (2**30, 1), "Ti": (2**40, 1), "Pi": (2**50, 1), "Ei": (2**60, 1),
}  # fmt: skip
AMOUNT_MAX = 2**62
DIGITS_MAX = 20


@lru_cache(maxsize=4096)
def parse_amount(resource: str, quantity: str | float) -> int:
    """Return a requested or allocatable quantity in the units that are counted: cpu in thousandths, all else whole.

    Fractions are rounded up, as kube-scheduler does. Text that is no quantity and numbers below zero count as 0, so
    that one odd object cannot stop all others; what is too large for any machine counts as AMOUNT_MAX.
    """
    text = str(quantity).strip()
    suffix = next((one for one in (text[-2:], text[-1:]) if one in _RATIOS), "")
    number, (times, parts) = text.removesuffix(suffix), _RATIOS[suffix]
    times *= 1000 if resource == "cpu" else 1
    if number.isascii() and number.isdigit() and len(number) <= DIGITS_MAX:
        return min(AMOUNT_MAX, -(-int(number) * times // parts))  # the only form that the API server writes
    try:
        amount = Decimal(number) * (Decimal(times) / parts)
    except InvalidOperation:
        return 0
    except Overflow:
        return AMOUNT_MAX
    if not amount.is_finite() or amount <= 0:
        return 0
    return AMOUNT_MAX if amount >= AMOUNT_MAX else int(amount.to_integral_value(ROUND_CEILING))


def is_zero(quantity: str | float) -> bool:
    """Tell whether a quantity begins without any digit above 0, in little time."""
    return not str(quantity).lstrip("0.")[:1].isdigit()
