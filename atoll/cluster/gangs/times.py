"""UTC times as Kubernetes writes them, to and from seconds since 1970.

Pure arithmetic on the proleptic Gregorian calendar (Howard Hinnant, "chrono-compatible low-level date algorithms"): the
pure rooms know no clock and import none. Out: seconds without fractions lost, texts of whole seconds.
"""

import re

_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(\.\d{1,9})?Z", re.ASCII)
_ERA_DAYS = 146_097
_EPOCH_DAYS = 719_468


def seconds_of(text: str) -> float | None:
    """Return the seconds since 1970 of a time such as 2026-01-31T12:00:00Z; None for text that is none."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 60):
        return None
    years = year - (month <= 2)
    era, year_of_era = divmod(years, 400)
    day_of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    days = era * _ERA_DAYS + year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year - _EPOCH_DAYS
    return days * 86_400 + hour * 3600 + minute * 60 + second + float(match.group(7) or 0)


def text_of(seconds: float) -> str:
    """Return the time of whole seconds since 1970, rounded down, as Kubernetes writes it."""
    days, rest = divmod(int(seconds // 1), 86_400)
    era, day_of_era = divmod(days + _EPOCH_DAYS, _ERA_DAYS)
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * shifted + 2) // 5 + 1
    month = shifted + 3 if shifted < 10 else shifted - 9
    year = year_of_era + era * 400 + (month <= 2)
    return f"{year:04d}-{month:02d}-{day:02d}T{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}Z"
